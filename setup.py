"""Packaging of tfdist; reads no file, so that it installs when copied alone."""

from setuptools import find_packages, setup

# Version 4.9.10 imports importlib-resources without requiring it.
TFDS = ["tensorflow-datasets>=4.9.9", "importlib-resources>=6"]

# These build docs/.
DOCS = ["furo>=2025.9", "myst-parser>=4", "sphinx>=8"]

setup(
    name="tfdist",
    version="0.1.0",
    description="TensorFlow's distributed training toolkit for Keras 3.",
    author="The tfdist authors",
    # Whoever publishes it says where, here, and then runs
    # `python -m notebooks.prepare`. No account can have this name.
    url="https://github.com/THE_OWNER/tfdist",
    license="Apache-2.0",
    keywords="tensorflow keras distributed parameter-server estimator",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Education",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    python_requires=">=3.11,<3.14",
    # Not the example: a user's own package may be called `trainer`, too.
    packages=find_packages(include=["tfdist*"]),
    entry_points={"console_scripts": ["tfdist=tfdist.__main__:main"]},
    package_data={"": ["*.pyi", "py.typed", "*.md"]},
    install_requires=[
        # Tested by .ci/versions; the private names in tfdist/_tf pin these two.
        "tensorflow>=2.18,<2.22",
        "keras>=3.12,<3.16",
        "absl-py>=2.1",
        "grpcio>=1.60",
        "lazy-loader>=0.4",
        "numpy>=1.26",
        "pyyaml>=6",
        "tensorboard>=2.18",
    ],
    extras_require={
        "tfds": TFDS,
        "gpu": ["tensorflow[and-cuda]>=2.18,<2.22"],
        "docs": DOCS,
        "test": [
            *DOCS,
            *TFDS,
            "array-record>=0.5",
            "google-cloud-aiplatform>=1.60",
            "hypothesis>=6.100",
            "ipykernel>=6.29",
            "keras-tuner>=1.4",
            "matplotlib>=3.8",
            "mypy>=1.15",
            "nbclient>=0.10",
            "pandas>=2.2",
            "psutil>=5.9",
            "pytest>=8",
            "pytest-xdist>=3.8",
            "ruff>=0.9",
            "trustme>=1.2",
        ],
        "notebooks": [
            *TFDS,
            "google-cloud-aiplatform>=1.60",
            "ipykernel>=6.29",
            "matplotlib>=3.8",
            "nbclient>=0.10",
        ],
        "tuner": ["keras-tuner>=1.4"],
        # The types that job files for Vertex AI are checked with.
        "vertex": ["google-cloud-aiplatform>=1.60"],
    },
)
