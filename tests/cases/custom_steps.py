"""Models with a custom `train_step`, as in Keras' guides."""

import keras
import numpy as np
import tensorflow as tf
from keras import ops

import tfdist
from tests.cases import STEPS, case, examples, seeded
from tests.cases.losses import Small

WAYS_OUT = "Override `compute_loss` instead, or train by all-reduce, mirrored"
TWICE = {"ps": f"applies gradients [0-9] times .* {WAYS_OUT}"}


def compiled(kind, *layers, optimizer="sgd", loss="mse", **arguments):
    """A functional model of a class, over four features."""
    x = y = keras.Input([4])
    for layer in layers or [keras.layers.Dense(3, "tanh")]:
        y = layer(y)
    model = kind(x, keras.layers.Dense(1)(y))
    model.compile(optimizer, loss, **arguments)
    return model


# --- Customizing what happens in `fit` ---------------------------------------


class Guide(keras.Model):
    """The first of the guide: Keras' loss, metrics and optimizer."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        variables = self.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply(gradients, variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


class LowerLevel(keras.Model):
    """The second: a loss and metrics of its own; compiled with neither."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae_metric = keras.metrics.MeanAbsoluteError(name="mae")
        self.loss_fn = keras.losses.MeanSquaredError()

    @property
    def metrics(self):
        return [self.loss_tracker, self.mae_metric]

    def loss_of(self, y, y_pred):
        return self.loss_fn(y, y_pred)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.loss_of(y, y_pred)
        weights = self.trainable_weights
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.loss_tracker.update_state(loss)
        self.mae_metric.update_state(y, y_pred)
        return {
            "loss": self.loss_tracker.result(),
            "mae": self.mae_metric.result(),
        }


class OwnMean(LowerLevel):
    """Its loss is a mean that Keras divides by no number of replicas."""

    def loss_of(self, y, y_pred):
        return ops.mean(keras.losses.mean_squared_error(y, y_pred))


@case("keras' loss and metrics")
def guide(job):
    job.trains_as_fit(lambda: compiled(Guide, metrics=["mae"]))


@case("a loss object and metrics of its own")
def lower_level(job):
    job.trains_as_fit(lambda: compiled(LowerLevel, loss=None))


@case("the optimizer of a model within", TWICE)
def within(job):
    class Trainer(keras.Model):
        def train_step(self, data):
            x, y = data
            model = self.layers[-1]
            with tf.GradientTape() as tape:
                loss = ops.mean(ops.square(y - model(x, training=True)))
            weights = model.trainable_weights
            model.optimizer.apply(tape.gradient(loss, weights), weights)
            return {"loss": loss}

    def model_fn():
        model = compiled(keras.Model)
        trainer = Trainer(model.inputs, model(model.inputs[0]))
        trainer.compile()
        return trainer

    job.trains_as_fit(model_fn)


class ListedTwice(LowerLevel):
    """Keras lists a metric that is an attribute, too."""

    @property
    def metrics(self):
        return [*keras.Model.metrics.fget(self), self.mae_metric]


class LossesAfterwards(LowerLevel):
    """Reads the losses of layers after it has applied gradients."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.penalty = keras.metrics.Mean(name="penalty")

    @property
    def metrics(self):
        return [*super().metrics, self.penalty]

    def train_step(self, data):
        results = super().train_step(data)
        self.penalty.update_state(sum(self.losses))
        return {**results, "penalty": self.penalty.result()}


@case("losses of layers after an update")
def losses_afterwards(job):
    class Keeps(tfdist.SessionRunHook):
        def after_run(self, run_context, run_values):
            results.append(run_values.results["penalty"])

    def make():
        layers = keras.layers.Dense(3), Small()
        return compiled(LossesAfterwards, *layers, loss=None)

    results, (x, y) = [], examples(8)
    job.estimator(make).train(
        lambda: tf.data.Dataset.from_tensors((x, y)), hooks=[Keeps()]
    )
    if job.is_chief:
        history = seeded(make).fit(x, y, batch_size=len(x), verbose=0).history
        np.testing.assert_allclose(results[0], history["penalty"][0], rtol=1e-5)


@case("metrics with one listed twice")
def listed_twice(job):
    job.trains_as_fit(lambda: compiled(ListedTwice, loss=None))


@case("a mean of its own as loss")
def own_mean(job):
    job.trains_as_fit(lambda: compiled(OwnMean, loss=None))


# --- Adversarial networks ----------------------------------------------------


class GAN(keras.Model):
    """As in Keras' DCGAN guide: two optimizers, two tapes."""

    def __init__(self):
        super().__init__()
        self.discriminator = keras.Sequential(
            [keras.Input([4]), keras.layers.Dense(1)]
        )
        self.generator = keras.Sequential(
            [keras.Input([3]), keras.layers.Dense(4)]
        )
        self.seed_generator = keras.random.SeedGenerator(1337)

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def noise(self, size):
        return keras.random.normal((size, 3), seed=self.seed_generator)

    def train_step(self, real):
        size = ops.shape(real)[0]
        fake = self.generator(self.noise(size))
        both = ops.concatenate([fake, real], axis=0)
        labels = ops.concatenate(
            [ops.ones((size, 1)), ops.zeros((size, 1))], axis=0
        )
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply(tape.gradient(d_loss, weights), weights)
        noise = self.noise(size)
        with tf.GradientTape() as tape:
            predictions = self.discriminator(self.generator(noise))
            g_loss = self.loss_fn(ops.zeros((size, 1)), predictions)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply(tape.gradient(g_loss, weights), weights)
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {
            "d_loss": self.d_loss_metric.result(),
            "g_loss": self.g_loss_metric.result(),
        }


class SameNoise(GAN):
    """Of the same noise in every row: what replicas learn can be compared."""

    def noise(self, size):
        return ops.ones((size, 3))


def gan(kind=SameNoise, optimizer=keras.optimizers.Adam, **arguments):
    model = kind()
    model.compile(
        optimizer(0.01, **arguments),
        optimizer(0.02, **arguments),
        keras.losses.BinaryCrossentropy(from_logits=True),
    )
    return model


@case("a GAN: two tapes and two optimizers", TWICE)
def two_optimizers(job):
    job.trains_as_fit(gan, examples()[0])


@case("a GAN with random noise", TWICE)
def random_noise(job):
    estimator = job.estimator(lambda: gan(GAN))
    real = examples()[0]
    estimator.train(
        lambda: tf.data.Dataset.from_tensors(real).repeat(), max_steps=STEPS
    )
    if job.is_chief:
        names = estimator.get_variable_names()
        own = [n for n in names if n.startswith("train_step")]
        counters = [n for n in own if "iteration" in n]
        assert len(counters) == 2, names
        for name in counters:
            assert estimator.get_variable_value(name) == STEPS
        assert len([n for n in own if "momentum" in n]) == 4


class WGAN(GAN):
    """As in Keras' WGAN-GP guide: three critic steps, a gradient penalty."""

    def noise(self, size):
        return ops.ones((size, 3))

    def gradient_penalty(self, real, fake):
        mixed = real + 0.3 * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(mixed)
            predictions = self.discriminator(mixed)
        gradients = tape.gradient(predictions, [mixed])[0]
        norm = ops.sqrt(ops.sum(ops.square(gradients), axis=1))
        return ops.mean((norm - 1.0) ** 2)

    def train_step(self, real):
        size = ops.shape(real)[0]
        for _ in range(3):
            with tf.GradientTape() as tape:
                fake = self.generator(self.noise(size))
                margin = self.discriminator(fake), self.discriminator(real)
                d_cost = ops.mean(margin[0]) - ops.mean(margin[1])
                d_loss = d_cost + 10.0 * self.gradient_penalty(real, fake)
            weights = self.discriminator.trainable_variables
            gradients = tape.gradient(d_loss, weights)
            self.d_optimizer.apply_gradients(
                zip(gradients, weights, strict=True)
            )
        with tf.GradientTape() as tape:
            fake = self.generator(self.noise(size))
            g_loss = -ops.mean(self.discriminator(fake))
        weights = self.generator.trainable_variables
        gradients = tape.gradient(g_loss, weights)
        self.g_optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"d_loss": d_loss, "g_loss": g_loss}


@case("a WGAN with gradient penalty", TWICE)
def wgan(job):
    def model_fn():
        model = gan(WGAN)
        for layer in (keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)):
            model.discriminator.add(layer)
        return model

    job.trains_as_fit(model_fn, examples()[0])


class Penalty(LowerLevel):
    """The gradient of its output by its input is to be short."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                y_pred = self(x, training=True)
            slope = inner.gradient(y_pred, x)
            penalty = ops.mean(ops.sum(ops.square(slope), axis=1))
            loss = self.loss_fn(y, y_pred) + penalty
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss, "penalty": penalty}


@case("a gradient penalty, one optimizer")
def penalty(job):
    job.trains_as_fit(lambda: compiled(Penalty, loss=None))


# --- Other guides ------------------------------------------------------------


class Distiller(keras.Model):
    """As in Keras' guide to knowledge distillation."""

    def __init__(self, student, teacher):
        super().__init__()
        self.student = student
        self.teacher = teacher
        self.teacher.trainable = False

    def compile(self, optimizer, student_loss_fn, distillation_loss_fn):
        super().compile(optimizer=optimizer)
        self.student_loss_fn = student_loss_fn
        self.distillation_loss_fn = distillation_loss_fn

    def call(self, x):
        return self.student(x)

    def train_step(self, data):
        x, y = data
        teacher_predictions = self.teacher(x, training=False)
        with tf.GradientTape() as tape:
            predictions = self.student(x, training=True)
            student_loss = self.student_loss_fn(y, predictions)
            distillation_loss = (
                self.distillation_loss_fn(
                    ops.softmax(teacher_predictions / 3.0, axis=1),
                    ops.softmax(predictions / 3.0, axis=1),
                )
                * 3.0**2
            )
            loss = 0.1 * student_loss + 0.9 * distillation_loss
        weights = self.student.trainable_variables
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {
            "student_loss": student_loss,
            "distillation_loss": distillation_loss,
        }


@case("knowledge distillation")
def distillation(job):
    def network(units):
        hidden = keras.layers.Dense(units, "relu")
        return keras.Sequential(
            [keras.Input([4]), hidden, keras.layers.Dense(2)]
        )

    def model_fn():
        model = Distiller(network(3), network(6))
        model.compile(
            "adam",
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            keras.losses.KLDivergence(),
        )
        return model

    x, y = examples()
    job.trains_as_fit(model_fn, (x, y.astype("int64")))


class Contrastive(LowerLevel):
    """Each example is told from the others of its batch, as by SimCLR."""

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            one, two = self(x), self(x * 1.1)
            similarities = ops.matmul(one, ops.transpose(two))
            labels = ops.arange(ops.shape(x)[0])
            loss = ops.mean(
                keras.losses.sparse_categorical_crossentropy(
                    labels, similarities, from_logits=True
                )
            )
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


@case("a contrastive loss within the batch")
def contrastive(job):
    """Between replicas, within the share of each: other weights than of one."""
    rtol = 1e-4 if job.strategy in ("one process", "ps") else 0.5
    job.trains_as_fit(lambda: compiled(Contrastive, loss=None), rtol=rtol)


class Triplets(keras.Model):
    """A subclassed model, whose batch is a dictionary."""

    def __init__(self):
        super().__init__()
        self.embed = keras.layers.Dense(3)

    def call(self, x):
        return self.embed(x)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            anchor, near, far = (self(data[i]) for i in "anf")
            distances = [
                ops.sum(ops.square(anchor - other), axis=-1)
                for other in (near, far)
            ]
            loss = ops.mean(ops.relu(distances[0] - distances[1] + 0.5))
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@case("triplets")
def triplets(job):
    data = {name: examples(seed=i)[0] for i, name in enumerate("anf")}

    def model_fn():
        model = Triplets()
        model.embed.build([None, 4])
        model.built = True
        model.compile("sgd")
        return model

    job.trains_as_fit(model_fn, data)


# --- What a step may do ------------------------------------------------------


class Weighted(keras.Model):
    def train_step(self, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(
                x=x, y=y, y_pred=y_pred, sample_weight=sample_weight
            )
            scaled = self.optimizer.scale_loss(loss)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(scaled, variables), variables)
        return self.compute_metrics(x, y, y_pred, sample_weight)


@case("sample weights, and what compute_metrics returns")
def weights(job):
    batch = (*examples(), np.linspace(0, 1, 12, dtype="float32"))
    job.trains_as_fit(lambda: compiled(Weighted, metrics=["mae"]), batch)


@case("a loss scale")
def loss_scale(job):
    optimizer = keras.optimizers.SGD
    job.trains_as_fit(
        lambda: compiled(Weighted, optimizer=optimizer(loss_scale_factor=8.0))
    )


@case("a batch that replicas share unevenly")
def uneven(job):
    job.trains_as_fit(lambda: compiled(OwnMean, loss=None), examples(7))


@case("clipping by the optimizer")
def clipping(job):
    job.trains_as_fit(
        lambda: compiled(
            Guide, optimizer=keras.optimizers.Adam(0.01, global_clipnorm=0.1)
        )
    )


@case("a regularizer")
def regularizer(job):
    layer = keras.layers.Dense
    job.trains_as_fit(
        lambda: compiled(Guide, layer(3, kernel_regularizer="l2"))
    )


@case("steps_per_execution")
def steps_per_execution(job):
    job.trains_as_fit(lambda: compiled(Guide, steps_per_execution=2))


@case("an average of weights")
def use_ema(job):
    optimizer = keras.optimizers.Adam
    job.estimator(
        lambda: compiled(Guide, optimizer=optimizer(use_ema=True))
    ).train(dataset, max_steps=STEPS)


def dataset():
    return tf.data.Dataset.from_tensors(examples()).repeat()


@case("an Embedding")
def embedding(job):
    x, y = np.arange(12) % 5, examples()[1]

    def model_fn():
        ids = keras.Input([], dtype="int32")
        rows = keras.layers.Embedding(6, 3)(ids)
        model = OwnMean(ids, keras.layers.Dense(1)(rows))
        model.compile("sgd")
        return model

    job.trains_as_fit(model_fn, (x, y))


@case("a PartitionedEmbedding")
def partitioned(job):
    x, y = np.arange(12) % 5, examples()[1]

    def model_fn():
        ids = keras.Input([], dtype="int64")
        rows = tfdist.PartitionedEmbedding(6, 3)(ids)
        model = OwnMean(ids, keras.layers.Dense(1)(rows))
        model.compile("sgd")
        return model

    job.trains_as_fit(model_fn, (x, y))


class Bare(LowerLevel):
    """Its logs are no results of metrics."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_fn(y, self(x, training=True))
        weights = self.trainable_weights
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply(gradients, weights)
        return {"loss": loss, "rate": self.optimizer.learning_rate}


@case("logs that are plain tensors")
def bare(job):
    job.trains_as_fit(lambda: compiled(Bare, loss=None))


class MeanTeacher(OwnMean):
    """After each step the teacher follows the student."""

    def train_step(self, data):
        logs = super().train_step(data)
        kernel = self.layers[-1].kernel
        self.teacher.assign(0.9 * self.teacher + 0.1 * kernel)
        return logs


@case(refused={"ps": "reads 'dense_1/kernel' after it has applied"})
def a_teacher_that_follows(job):
    def model_fn():
        model = compiled(MeanTeacher, loss=None)
        model.teacher = model.add_weight(
            shape=[3, 1], trainable=False, name="teacher"
        )
        return model

    job.trains_as_fit(model_fn)


class Decaying(OwnMean):
    def train_step(self, data):
        logs = super().train_step(data)
        for weight in self.trainable_weights:
            weight.assign(weight * 0.9)
        return logs


REFUSED = "assigns 'dense.*, which its optimizer updates.*Override"


@case(
    "trained weights that the step assigns",
    {
        "mirrored": REFUSED,
        "all-reduce": REFUSED,
        "ps": REFUSED,
    },
)
def assigning(job):
    job.trains_as_fit(lambda: compiled(Decaying, loss=None))


class Tested(Guide):
    def test_step(self, data):
        x, y = data
        y_pred = self(x, training=False)
        loss = self.compute_loss(y=y, y_pred=y_pred)
        return {"loss": loss, "most": ops.max(y_pred)}

    def predict_step(self, data):
        return 2.0 * self(data[0], training=False)


@case("a test_step and a predict_step")
def evaluating(job):
    estimator = job.trains_as_fit(lambda: compiled(Tested))
    if not job.is_chief:
        return
    found = estimator.evaluate(dataset, steps=1)
    model = seeded(lambda: compiled(Tested))
    model.fit(dataset(), steps_per_epoch=STEPS, verbose=0)
    wanted = model.evaluate(dataset(), steps=1, verbose=0, return_dict=True)
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-3)


class OwnLoss(keras.Model):
    """The guide's other way: it overrides what the step calls."""

    def compute_loss(self, x=None, y=None, y_pred=None, *_, **__):
        return ops.mean(ops.square(y - y_pred)) + ops.mean(ops.abs(y_pred))

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**results, "double": 2 * results["mae"]}


class OwnMetric(keras.Model):
    """The example of `compute_metrics`: a result from before its update."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.custom_metric = keras.metrics.MeanAbsoluteError(name="custom")

    def compute_metrics(self, x, y, y_pred, sample_weight):
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        self.custom_metric.update_state(y, y_pred, sample_weight)
        results["custom_metric_name"] = self.custom_metric.result()
        return results


@case("a metric that compute_metrics updates last")
def own_metric(job):
    job.trains_as_fit(lambda: compiled(OwnMetric, metrics=["mae"]))


@case("compute_loss and compute_metrics")
def own_loss(job):
    job.trains_as_fit(lambda: compiled(OwnLoss, metrics=["mae"]))


class Plain(Guide):
    """Trains a variable of TensorFlow's."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.scale = tf.Variable(1.0)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self.scale * self(x))
        variables = [*self.trainable_variables, self.scale]
        *gradients, of_scale = tape.gradient(loss, variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.scale.assign_sub(0.01 * of_scale)
        return {"loss": loss}


@case("a tf.Variable", refused="`scale` of layer 'plain.*, which is not one")
def plain_variable(job):
    job.trains_as_fit(lambda: compiled(Plain))


class OwnFunction(keras.Model):
    def make_train_function(self, force=False):
        self.train_function = lambda iterator: {"loss": 0.0}


@case("make_train_function", refused="Override `train_step` instead")
def own_function(job):
    job.trains_as_fit(lambda: compiled(OwnFunction))


class ByParts(keras.Model):
    """Its batch is what its network takes; it is never called itself."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def call(self, inputs):
        return self.network(inputs)

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            near, far = self.network(batch)
            loss = keras.ops.mean(keras.ops.relu(near - far + 0.5))
        weights = self.network.trainable_weights
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"distance": loss}


@case()
def a_batch_that_is_not_called_by_its_features(job):
    def model_fn():
        inputs = [keras.Input([4]) for _ in range(3)]
        embed = keras.layers.Dense(2)
        one, like, other = map(embed, inputs)
        pairs = (one - like, one - other)
        outputs = [keras.ops.sum(each**2, -1) for each in pairs]
        model = ByParts(keras.Model(inputs, outputs))
        model.compile("sgd")
        return model

    triple = tuple(examples(seed=i)[0] for i in range(3))
    job.trains_as_fit(model_fn, triple)


class Averaged(keras.Model):
    """Its second network, a clone of the first, averages that one's weights."""

    def __init__(self):
        super().__init__()
        layers = [
            keras.Input([4]),
            keras.layers.Dense(3),
            keras.layers.Dense(1),
        ]
        self.network = keras.Sequential(layers)
        self.ema_network = keras.models.clone_model(self.network)
        self.ema_network.trainable = False

    def call(self, inputs, training=None):
        return self.network(inputs)

    def train_step(self, data):
        # Keras makes `Guide` functional once a case calls it as such.
        results = Guide.train_step(self, data)
        pairs = zip(self.network.weights, self.ema_network.weights, strict=True)
        for weight, average in pairs:
            average.assign(0.9 * average + 0.1 * weight)
        return results


@case(
    "averages in a clone, as of DDIM and BYOL",
    {"ps": "reads 'network/dense/kernel' after it has applied"},
)
def averages_in_a_clone(job):
    def make():
        model = Averaged()
        model.compile("sgd", "mse")
        return model

    job.trains_as_fit(make)
