from .banner import without_banner as without_banner
from .testing import LocalCluster as LocalCluster
