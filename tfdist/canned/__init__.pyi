from .estimators import DNNClassifier as DNNClassifier
from .estimators import (
    DNNLinearCombinedClassifier as DNNLinearCombinedClassifier,
)
from .estimators import DNNLinearCombinedRegressor as DNNLinearCombinedRegressor
from .estimators import DNNRegressor as DNNRegressor
from .estimators import LinearClassifier as LinearClassifier
from .estimators import LinearRegressor as LinearRegressor
from .feature_columns import shared_embeddings as shared_embeddings
from .layers import DenseFeatures as DenseFeatures
from .layers import LinearModel as LinearModel
