"""tfdist/data/tfds_inputs.py."""

from typing import ClassVar

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from array_record.python import array_record_module

from tfdist.data import tfds_inputs

SIZE = 20
FEATURES = {"x": tf.io.FixedLenFeature([], tf.int64)}


class Boats(tfds.core.GeneratorBasedBuilder):
    """Features that are parsed many at once; with a picture, one by one."""

    VERSION = tfds.core.Version("1.0.0")
    code_path = None
    BUILDER_CONFIGS: ClassVar = [
        tfds.core.BuilderConfig(name=name)
        for name in ("plain", "pictures", "ports")
    ]

    def _info(self):
        features = {
            "crew": {"size": np.int8, "home": np.str_},
            "length": tfds.features.Tensor(shape=(2,), dtype=np.float64),
            "old": np.bool_,
            "sunk": tfds.features.ClassLabel(num_classes=2),
        }
        if self.builder_config.name == "pictures":
            features["photo"] = tfds.features.Image(shape=(2, 1, 3))
        if self.builder_config.name == "ports":
            port = tfds.features.FeaturesDict({"name": np.str_})
            features["ports"] = tfds.features.Sequence(port, length=2)
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(features),
            supervised_keys=("crew", "sunk"),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for i in range(SIZE):
            features = {
                "crew": {"size": i, "home": f"h{i}"},
                "length": [i / 2, 1.0],
                "old": i < 5,
                "sunk": i % 2,
            }
            if self.builder_config.name == "pictures":
                features["photo"] = np.full((2, 1, 3), i, np.uint8)
            if self.builder_config.name == "ports":
                features["ports"] = [{"name": f"a{i}"}, {"name": "b"}]
            yield i, features


def prepared(folder, config, file_format):
    builder = Boats(config=config, data_dir=str(folder))
    builder.download_and_prepare(file_format=file_format)
    return builder


def flat(dataset):
    return [
        [value.tolist() for value in tf.nest.flatten(batch)]
        for batch in dataset.as_numpy_iterator()
    ]


@pytest.mark.parametrize(
    ("config", "file_format"),
    [
        ("plain", "tfrecord"),
        ("pictures", "tfrecord"),
        ("ports", "tfrecord"),
        ("plain", "array_record"),
    ],
)
def test_as_tfds_gives_it(tmp_path, config, file_format):
    builder = prepared(tmp_path, config, file_format)
    split = "train[20%:80%]"
    ours = tfds_inputs.read_tfds(
        builder, split, 5, shuffle=False, num_epochs=1, drop_remainder=True
    )
    if file_format == "tfrecord":
        theirs = builder.as_dataset(split=split).batch(5, drop_remainder=True)
        assert ours.element_spec == theirs.element_spec
        assert flat(ours) == flat(theirs)
    found = np.concatenate([b["crew"]["size"] for b in ours])
    assert found.tolist() == list(range(4, 14))


@pytest.mark.slow
def test_shares_of_tfds(tmp_path):
    builder = prepared(tmp_path, "plain", "tfrecord")
    found = []
    for worker in range(3):
        context = tf.distribute.InputContext(3, tf.constant(worker), 3)
        dataset = tfds_inputs.read_tfds(
            builder,
            "train",
            4,
            as_supervised=True,
            num_epochs=1,
            context=context,
        )
        for features, label in dataset.as_numpy_iterator():
            found += features["size"].tolist()
            assert label.tolist() == (features["size"] % 2).tolist()
    assert sorted(found) == list(range(SIZE))


def test_not_prepared(tmp_path):
    builder = Boats(config="plain", data_dir=str(tmp_path))
    with pytest.raises(ValueError, match=r"boats/plain/1.0.0 is not prepared"):
        tfds_inputs.read_tfds(builder, "train", 4)


def test_array_records(tmp_path):
    count = iter(range(600))
    for size in (300, 0, 299):
        path = str(tmp_path / f"{size}.array_record")
        writer = array_record_module.ArrayRecordWriter(path, "group_size:1")
        for _ in range(size):
            feature = tf.train.Feature(
                int64_list=tf.train.Int64List(value=[next(count)])
            )
            features = tf.train.Features(feature={"x": feature})
            example = tf.train.Example(features=features)
            writer.write(example.SerializeToString())
        writer.close()
    pattern = str(tmp_path / "*")

    def read(context=None):
        return tfds_inputs.read_array_records(
            pattern, FEATURES, 50, num_epochs=1, context=context
        )

    shares = [
        np.concatenate([b["x"] for b in read(context)]).tolist()
        for context in (tf.distribute.InputContext(2, i, 2) for i in (0, 1))
    ]
    assert sorted(shares[0] + shares[1]) == list(range(599))
    with pytest.raises(ValueError, match="are read by Python"):
        read(tf.distribute.InputContext(2, tf.constant(1), 2))
    # Another file of the same name is not the one that was open.
    writer = array_record_module.ArrayRecordWriter(path, "group_size:1")
    writer.write(example.SerializeToString())
    writer.close()
    assert sum(len(batch["x"]) for batch in read()) == 301
    (tmp_path / "none").write_bytes(b"no such file" * 99)
    with pytest.raises(ValueError, match=r"none cannot be read .* 64KB"):
        read()
