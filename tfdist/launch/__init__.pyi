from .testing import LocalCluster as LocalCluster
