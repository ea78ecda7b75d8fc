from .health import ServerLostError as ServerLostError
from .servers import release as release
from .servers import serve as serve
from .spec import Cluster as Cluster
