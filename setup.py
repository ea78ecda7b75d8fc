"""Packaging of tfdist; reads no file, so that it installs when copied alone."""

from setuptools import find_packages, setup

setup(
    name="tfdist",
    version="0.1.0",
    description="TensorFlow's distributed training toolkit for Keras 3.",
    license="Apache-2.0",
    python_requires=">=3.11,<3.14",
    packages=find_packages(include=["tfdist*", "trainer*"]),
    package_data={"": ["*.pyi", "py.typed", "*.md"]},
    install_requires=[
        # The private names listed in tfdist/_tf/private.py pin these two.
        "tensorflow>=2.21,<2.22",
        "keras>=3.15,<3.16",
        "absl-py>=2.1",
        "grpcio>=1.60",
        # TensorFlow Datasets 4.9.10 imports it on Python 3.11 and later
        # without requiring it.
        "importlib-resources>=6",
        "lazy-loader>=0.4",
        "numpy>=1.26",
        "pandas>=2.2",
        "pyyaml>=6",
        "tensorboard>=2.20",
        "tensorflow-datasets>=4.9.9",
    ],
    extras_require={
        "test": [
            "array-record>=0.5",
            "google-cloud-aiplatform>=1.60",
            "hypothesis>=6.100",
            "ipykernel>=6.29",
            "matplotlib>=3.8",
            "mypy>=1.15",
            "nbclient>=0.10",
            "psutil>=5.9",
            "pytest>=8",
            "pytest-xdist>=3.8",
            "ruff>=0.9",
            "trustme>=1.2",
        ],
        "notebooks": [
            "google-cloud-aiplatform>=1.60",
            "ipykernel>=6.29",
            "matplotlib>=3.8",
            "nbclient>=0.10",
        ],
        # The types that job files for Vertex AI are checked with.
        "vertex": ["google-cloud-aiplatform>=1.60"],
    },
)
