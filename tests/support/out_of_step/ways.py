"""The ways: what all processes run, and what the odd one does there."""

import os
import signal
import sys
import tempfile
import time

import keras
import numpy as np

from keras_multigpu import make_parallel

BATCH, EPOCHS = 8, 3
ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
WAYS = {}


def way(expected, *, own=None, data="same"):
    """Registers a way.

    Args:
        expected: what the error says of the odd process; `None` if there is none.
        own: how the odd process ends, if not by that error: the name of an exception, or "".
        data: an argument of `join`.
    """

    def register(function):
        WAYS[function.__name__] = (function, expected, own, data)
        return function

    return register


def numbers(rows=48, seed=7):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 6)).astype("float32")
    return x, np.tanh(x[:, :2])


def build(
    optimizer=None, units=8, seed=7, loss="mse", first=keras.layers.Dense, shard=None, **options
):
    keras.utils.set_random_seed(seed)
    layers = [keras.Input((6,)), first(units, "tanh"), keras.layers.Dense(2)]
    parallel = make_parallel(keras.Sequential(layers), shard=shard)
    parallel.compile(optimizer or keras.optimizers.SGD(0.05, momentum=0.9), loss, **options)
    keras.utils.set_random_seed(7)
    return parallel


class Noisy(keras.layers.Dense):
    """Draws numbers in each step."""

    def build(self, shape):
        super().build(shape)
        self.drop = keras.layers.Dropout(0.5, seed=3)

    def call(self, x, training=None):
        return self.drop(super().call(x), training=training)


def fit(model, x=None, y=None, **options):
    if x is None:
        x, y = numbers()
        options = {"batch_size": BATCH, **options}
    return model.fit(x, y, **{"epochs": EPOCHS, "verbose": 0, "shuffle": False, **options})


def batches(count=6):
    x, y = numbers()
    for k in range(count):
        yield x[BATCH * k :][:BATCH], y[BATCH * k :][:BATCH]


class At(keras.callbacks.Callback):
    """Does something at one place of a training."""

    def __init__(self, place, action, number=1):
        super().__init__()
        setattr(self, place, self._act)
        self._action, self._number = action, number

    def _act(self, number=None, logs=None):
        if number in (None, self._number) or isinstance(number, dict):
            self._action(self.model)


def at(is_odd, place, action, number=1):
    """The callbacks of a process: the odd one has one."""
    return [At(place, action, number)] if is_odd else []


def raises(error):
    def action(model):
        raise error

    return action


def stop(model):
    model.stop_training = True


# Other lengths


@way("Its range of epochs is 0 to 2. In process . it is 0 to 3")
def fewer_epochs(odd):
    fit(build(), epochs=2 if odd else 3)


@way("Its range of epochs is 0 to 4. In process . it is 0 to 3")
def more_epochs(odd):
    fit(build(), epochs=4 if odd else 3)


@way("It is at the end of `fit`, after 12 steps")
def stops_after_an_epoch(odd):
    fit(build(), callbacks=at(odd, "on_epoch_end", stop))


@way("It is at the end of `fit`, after 9 steps")
def stops_within_an_epoch(odd):
    seen = []

    def count(model):
        seen.append(1)
        model.stop_training = len(seen) == 9

    callback = keras.callbacks.Callback()
    callback.on_train_batch_end = lambda batch, logs=None: count(callback.model)
    fit(build(), callbacks=[callback] if odd else [])


@way("It is at the end of `fit`, after 12 steps")
def stops_early_by_a_value_of_its_own(odd):
    class Local(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["own"] = 1.0 if odd else -float(epoch)

    stopping = keras.callbacks.EarlyStopping("own", patience=0, start_from_epoch=0, mode="min")
    fit(build(), callbacks=[Local(), stopping])


@way("It is at the end of `fit`, after 12 steps")
def runs_out_of_time(odd):
    begun = time.monotonic()

    def look(model):
        model.stop_training = time.monotonic() > begun

    fit(build(), callbacks=at(odd, "on_epoch_end", look))


@way("It is at .*of `fit`|Its rows and those|It makes another step")
def fewer_steps_in_an_epoch(odd):
    fit(build(), steps_per_epoch=4 if odd else 6)


@way("Its range of epochs is 0 to 3. In process . it is 0 to 2")
def more_epochs_of_fewer_steps(odd):
    fit(build(), steps_per_epoch=4 if odd else 6, epochs=3 if odd else 2)


@way("It is at |Its rows and those|It makes another step")
def fewer_rows(odd):
    x, y = numbers()
    rows = 32 if odd else 48
    fit(build(), x[:rows], y[:rows], batch_size=BATCH)


@way("It is at the end of `fit`, after 4 steps")
def a_generator_ends_early(odd):
    fit(build(), batches(4 if odd else 6), epochs=1)


@way("It is at the end of `evaluate`, after 2 steps")
def evaluates_less(odd):
    x, y = numbers()
    rows = 16 if odd else 48
    build().evaluate(x[:rows], y[:rows], batch_size=BATCH, verbose=0)


@way("It is at step 3 of `predict`")
def predicts_more(odd):
    build().predict(numbers()[0], batch_size=BATCH, steps=6 if odd else 2, verbose=0)


@way("Its range of epochs is 1 to 3. In process . it is 0 to 3")
def begins_at_a_later_epoch(odd):
    fit(build(), initial_epoch=1 if odd else 0)


@way("It is at the beginning of single steps|It is at ")
def more_single_steps(odd):
    model = build()
    for rows in list(batches())[: 5 if odd else 3]:
        model.train_on_batch(*rows)
    fit(model)


# Calls that the others don't make


def _few():
    x, y = numbers()
    return x[:16], y[:16]


@way("It makes another step than process .* is '(a )?test_step|It is at ")
def validates(odd):
    fit(build(), validation_data=_few() if odd else None)


@way("It makes another step than process|It is at ")
def does_not_validate(odd):
    fit(build(), validation_data=None if odd else _few())


@way("It makes another step than process|It is at ")
def validates_seldom(odd):
    fit(build(), validation_data=_few(), validation_freq=2 if odd else 1)


@way("Its rows|It makes another step|It is at ")
def splits_off_more(odd):
    fit(build(), validation_split=0.5 if odd else 0.25)


@way("It makes another step than process .* 'predict_step'")
def predicts_in_a_callback(odd):
    call = lambda model: model.predict(_few()[0], verbose=0)  # noqa: E731
    fit(build(), callbacks=at(odd, "on_epoch_end", call))


@way("It makes another step than process .* 'predict_step'|It is at step 19 of")
def predicts_after_the_last_epoch(odd):
    call = lambda model: model.predict(_few()[0], verbose=0)  # noqa: E731
    fit(build(), callbacks=at(odd, "on_epoch_end", call, 2))


@way("It makes another step than process .* '(a )?test_step|It is at ")
def evaluates_in_a_callback(odd):
    call = lambda model: model.evaluate(*_few(), verbose=0)  # noqa: E731
    fit(build(), callbacks=at(odd, "on_epoch_end", call))


@way("It makes another step than process|It is at ")
def evaluates_after_a_batch(odd):
    call = lambda model: model.evaluate(*_few(), verbose=0)  # noqa: E731
    fit(build(), callbacks=at(odd, "on_train_batch_end", call))


@way("It makes another step|Its rows|It is at ")
def trains_on_a_batch_in_a_callback(odd):
    call = lambda model: model.train_on_batch(*_few())  # noqa: E731
    fit(build(), callbacks=at(odd, "on_epoch_end", call))


@way("It makes another step|It is at ")
def tests_on_a_batch_in_a_callback(odd):
    call = lambda model: model.test_on_batch(*_few())  # noqa: E731
    fit(build(), callbacks=at(odd, "on_train_batch_end", call))


@way("It makes another step|It is at ")
def predicts_on_a_batch_in_a_callback(odd):
    call = lambda model: model.predict_on_batch(_few()[0])  # noqa: E731
    fit(build(), callbacks=at(odd, "on_epoch_begin", call))


@way("It is at the beginning of `fit` within `fit`, after 12 steps")
def trains_another_model_in_a_callback(odd):
    model, other = build(), build()
    fit(model, callbacks=at(odd, "on_epoch_end", lambda _: fit(other)))


@way("It is at the beginning of `evaluate` within `fit`, after 8 steps")
def evaluates_another_model_after_a_batch(odd):
    model, other = build(), build()
    call = lambda _: other.evaluate(*_few(), verbose=0)  # noqa: E731
    callback = keras.callbacks.Callback()
    seen = []
    callback.on_train_batch_end = lambda batch, logs=None: (
        seen.append(batch),
        len(seen) == 8 and call(None),
    )
    fit(model, callbacks=[callback] if odd else [])


@way("It is at the beginning of single steps within `fit`, after 12 steps")
def trains_another_model_on_a_batch(odd):
    model, other = build(), build()
    call = lambda _: other.train_on_batch(*_few())  # noqa: E731
    fit(model, callbacks=at(odd, "on_epoch_end", call))


@way("Its call is `evaluate`. In process . it is `fit`")
def evaluates_instead(odd):
    model = build()
    (model.evaluate if odd else model.fit)(*numbers(), verbose=0)


@way("Its call is `predict`. In process . it is `evaluate`")
def predicts_instead(odd):
    model, (x, y) = build(), numbers()
    fit(model)
    model.predict(x, verbose=0) if odd else model.evaluate(x, y, verbose=0)


@way("Its call is single steps. In process . it is `fit`")
def trains_on_a_batch_before(odd):
    model = build()
    if odd:
        model.train_on_batch(*_few())
    fit(model)


@way("It is at the beginning of `evaluate`|Its call is `evaluate`")
def one_call_more(odd):
    model = build()
    fit(model)
    if odd:
        model.evaluate(*_few(), verbose=0)
    fit(model)


@way("It has ended", own="")
def one_call_less(odd):
    model = build()
    fit(model)
    if not odd:
        fit(model)


@way("Its call is the writing of a file. In process . it is `fit`")
def saves_alone(odd):
    model = build()
    if odd:
        model.save_weights(f"/tmp/out_of_step_{os.getpid()}.weights.h5")
    fit(model)


@way("Its model is |Its compilation is |Its weights|Its rows")
def trains_models_in_another_order(odd):
    one, other = build(), build(units=16)
    fit(other if odd else one)
    fit(one if odd else other)


# Errors, and ends


@way("It has stopped with ValueError: no more", own="ValueError")
def raises_after_an_epoch(odd):
    fit(build(), callbacks=at(odd, "on_epoch_end", raises(ValueError("no more"))))


@way("It has stopped with ValueError: no more", own="ValueError")
def raises_after_a_batch(odd):
    fit(build(), callbacks=at(odd, "on_train_batch_end", raises(ValueError("no more"))))


@way("It has stopped with ValueError: no more", own="ValueError")
def raises_at_the_beginning(odd):
    fit(build(), callbacks=at(odd, "on_train_begin", raises(ValueError("no more"))))


@way("It has stopped with ValueError: no more", own="ValueError")
def raises_at_the_end(odd):
    fit(build(), callbacks=at(odd, "on_train_end", raises(ValueError("no more"))))


@way("It has stopped with ValueError: no more", own="ValueError")
def raises_in_validation(odd):
    callbacks = at(odd, "on_test_batch_end", raises(ValueError("no more")))
    fit(build(), validation_data=numbers(), validation_batch_size=8, callbacks=callbacks)


@way("It has stopped with ", own="(ValueError|RuntimeError|InvalidArgumentError|UnknownError)")
def raises_in_a_generator(odd):
    def generate():
        yield from batches(3)
        if odd:
            raise ValueError("no more")
        yield from batches(3)

    fit(build(), generate(), epochs=1)


class Sequence(keras.utils.PyDataset):
    def __init__(self, is_odd, action):
        super().__init__()
        self.is_odd, self.action = is_odd, action

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if self.is_odd and index == 3:
            self.action()
        return list(batches())[index]


@way("It has stopped with ", own=r"\w*Error")
def raises_in_a_dataset(odd):
    def action():
        raise OSError("gone")

    fit(build(), Sequence(odd, action), None)


@way("It has stopped with SystemExit", own="SystemExit")
def exits_in_a_callback(odd):
    fit(build(), callbacks=at(odd, "on_epoch_end", lambda model: sys.exit(3)))


@way("It has stopped with KeyboardInterrupt", own="KeyboardInterrupt")
def is_interrupted(odd):
    fit(build(), callbacks=at(odd, "on_epoch_end", raises(KeyboardInterrupt())))


@way("It has ended", own="SystemExit")
def exits_between_calls(odd):
    model = build()
    fit(model)
    if odd:
        sys.exit(3)
    fit(model)


@way("It has (ended without a word|given no sign of life)", own="-")
def ends_at_once(odd):
    fit(build(), callbacks=at(odd, "on_epoch_end", lambda model: os._exit(3)))


@way("It has (ended without a word|given no sign of life)", own="-")
def kills_itself(odd):
    kill = lambda model: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
    fit(build(), callbacks=at(odd, "on_train_batch_end", kill))


@way("It has stopped with ValueError", own="ClusterError")
def goes_on_after_an_error(odd):
    model = build()
    try:
        fit(model, callbacks=at(odd, "on_epoch_end", raises(ValueError("no more"))))
    except ValueError:
        fit(model)


# Other data


@way("Its rows and those of process . differ at step 1")
def another_batch_size(odd):
    fit(build(), batch_size=16 if odd else 8)


@way("Its rows and those")
def another_order(odd):
    keras.utils.set_random_seed(100 + odd)
    fit(build(), shuffle=odd)


@way("Its rows and those of process . differ at step 1")
def other_rows(odd):
    x, y = numbers(seed=8 if odd else 7)
    fit(build(), x, y, batch_size=BATCH)


@way("Its class_weight is ")
def class_weights(odd):
    x, _ = numbers()
    model = build(loss="sparse_categorical_crossentropy")
    weights = {0: 2.0, 1: 1.0} if odd else None
    fit(model, x, np.arange(48) % 2, batch_size=BATCH, class_weight=weights)


@way("Its rows and those of process . differ at step 1")
def sample_weights(odd):
    fit(build(), sample_weight=np.ones(48) if odd else None)


@way("Its rows and those of process . differ at step 1")
def another_type(odd):
    x, y = numbers()
    fit(build(), np.round(x).astype("int32" if odd else "float32"), y, batch_size=BATCH)


# Another state


@way("Its model's number")
def trains_another_of_two_alike(odd):
    models = [build(), build()]
    fit(models[odd])
    fit(models[not odd])


def _shift(model):
    model.set_weights([one + 0.1 for one in model.get_weights()])


def _set_rate(model):
    model.optimizer.learning_rate = 0.01


STATE = "Its (weights|state) and those of process|Its state and that of process|It makes another"


@way("Its weights and those of process . differ at step")
def other_weights(odd):
    fit(build(seed=8 if odd else 7))


@way(STATE)
def another_rate(odd):
    fit(build(keras.optimizers.SGD(0.2 if odd else 0.1)))


@way(STATE)
def sets_the_rate_after_an_epoch(odd):
    fit(build(), epochs=10, callbacks=at(odd, "on_epoch_end", _set_rate))


@way(STATE)
def sets_the_rate_after_a_batch(odd):
    fit(build(), epochs=10, callbacks=at(odd, "on_train_batch_end", _set_rate))


@way(f"{STATE}|It computes something else")
def sets_the_backend_after_an_epoch(odd):
    """JAX then draws other numbers, by another exchange; TensorFlow runs no functions."""

    def action(model):
        if ON_TENSORFLOW:
            import tensorflow as tf

            tf.config.run_functions_eagerly(True)
        else:
            import jax

            jax.config.update("jax_threefry_partitionable", False)

    fit(build(first=Noisy), epochs=10, callbacks=at(odd, "on_epoch_end", action))


@way(STATE)
def halves_the_rate(odd):
    """By what is on all devices already."""

    def action(model):
        rate = model.optimizer.learning_rate
        rate.assign(rate * 0.5)

    fit(build(), epochs=10, callbacks=at(odd, "on_epoch_end", action))


@way(STATE)
def schedules_the_rate(odd):
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (1 + odd * epoch))
    fit(build(), epochs=10, callbacks=[schedule])


@way(STATE)
def sets_weights_after_an_epoch(odd):
    fit(build(), epochs=10, callbacks=at(odd, "on_epoch_end", _shift))


@way(STATE)
def sets_moving_statistics(odd):
    keras.utils.set_random_seed(7)
    layers = [keras.Input((6,)), keras.layers.Dense(8), keras.layers.BatchNormalization()]
    model = make_parallel(keras.Sequential([*layers, keras.layers.Dense(2)]))
    model.compile("sgd", "mse")

    def action(model):
        model.non_trainable_variables[0].assign(np.ones(8))

    fit(model, epochs=10, callbacks=at(odd, "on_epoch_end", action))


@way(STATE)
def sets_one_bias(odd):
    def action(model):
        bias = model.weights[-1]
        bias.assign(bias.numpy() + 0.01)

    fit(build(), epochs=10, callbacks=at(odd, "on_epoch_end", action))


@way(STATE)
def halves_a_weight(odd):
    """By what is on all devices already."""

    def action(model):
        model.weights[0].assign(model.weights[0] * 0.5)

    fit(build(), epochs=10, callbacks=at(odd, "on_epoch_end", action))


@way(STATE)
def halves_a_weight_after_a_batch(odd):
    def action(model):
        model.weights[0].assign(model.weights[0] * 0.5)

    fit(build(), epochs=10, callbacks=at(odd, "on_train_batch_end", action))


@way(STATE)
def halves_a_weight_between_single_steps(odd):
    model = build()
    for turn in range(5):
        for number, rows in enumerate(batches()):
            model.train_on_batch(*rows)
            if odd and turn == number == 1:
                model.weights[0].assign(model.weights[0] * 0.5)


@way(None)
def halves_a_weight_in_all(odd):
    def action(model):
        model.weights[0].assign(model.weights[0] * 0.5)

    fit(build(), callbacks=at(True, "on_epoch_end", action))


@way(STATE)
def loads_weights(odd):
    model = build()
    path = f"/tmp/out_of_step_{os.getpid()}.weights.h5"
    model.template.save_weights(path)
    fit(model, epochs=10, callbacks=at(odd, "on_epoch_end", lambda one: one.load_weights(path)))


@way(STATE)
def sets_the_iterations(odd):
    action = lambda model: model.optimizer.iterations.assign(1000)  # noqa: E731
    fit(build("adam"), epochs=10, callbacks=at(odd, "on_epoch_end", action))


@way(STATE)
def clears_the_slots(odd):
    def action(model):
        for one in model.optimizer.variables[2:]:
            one.assign(np.zeros(one.shape))

    fit(build(), epochs=10, callbacks=at(odd, "on_epoch_end", action))


@way(STATE)
def sets_weights_between_single_steps(odd):
    model = build()
    for number, rows in enumerate(list(batches())[:4]):
        model.train_on_batch(*rows)
        if odd and number == 1:
            _shift(model)


@way("Its (weights|state)|It makes another step|It is at ")
def loses_a_number(odd):
    def action(model):
        model.set_weights([one * np.nan for one in model.get_weights()])

    callbacks = [*at(odd, "on_epoch_end", action), keras.callbacks.TerminateOnNaN()]
    fit(build(), epochs=10, callbacks=callbacks)


@way(STATE)
def trains_the_template_alone(odd):
    def action(model):
        model.template.compile("sgd", "mse")
        model.template.fit(*_few(), verbose=0)

    fit(build(), epochs=10, callbacks=at(odd, "on_epoch_end", action))


@way(STATE)
def sets_the_momentum_eagerly(odd):
    def action(model):
        model.optimizer.momentum = 0.0

    callbacks = at(odd, "on_epoch_end", action)
    fit(build(run_eagerly=True), epochs=10, callbacks=callbacks)


@way(r"Its (weights|state) and those|It has stopped with \w*Error", own=r"\w*Error")
def replaces_the_optimizer(odd):
    """It is not compiled, so the step is the one of before."""

    def action(model):
        model.optimizer = keras.optimizers.SGD(0.001)

    fit(build(), callbacks=at(odd, "on_epoch_end", action))


# Another model


@way("Its model is ")
def another_optimizer(odd):
    fit(build("adam" if odd else "sgd"))


@way("Its model is ")
def another_schedule(odd):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5 if odd else 0.9)
    fit(build(keras.optimizers.SGD(schedule)))


@way("Its model is ")
def another_size(odd):
    fit(build(units=16 if odd else 8))


@way("Its model is another than in process .: layer 'dense.*': kernel_regularizer=.*; there ")
def another_regularizer(odd):
    model = build()
    model.layers[0].kernel_regularizer = keras.regularizers.L2(0.2 if odd else 0.1)
    fit(model)


class Own(keras.layers.Dense):
    """Asks for something that the processes don't compare."""

    def call(self, inputs):
        found = super().call(inputs)
        return found - keras.ops.mean(found, axis=0) if "ODD" in os.environ else found


@way("It computes something else than process . at step .: .*; there ")
def another_branch_of_a_layer(odd):
    if odd:
        os.environ["ODD"] = "1"
    fit(build(first=Own))


class Centred(keras.layers.Dense):
    """Subtracts the mean of all rows, where it has been told to: one more sum over the devices."""

    def call(self, inputs, training=None):
        x = super().call(inputs, training=training)
        return x - keras.ops.mean(x, axis=0) if "ODD" in os.environ else x


@way("It computes something else than process . at step 1: .*; there ")
def another_sum_in_a_layer(odd):
    if odd:
        os.environ["ODD"] = "1"
    fit(build(units=256, first=Centred, shard="weights"))


class Normed(keras.optimizers.SGD):
    """Divides each gradient by its norm, where it has been told to."""

    def update_step(self, gradient, variable, learning_rate):
        if "ODD" in os.environ:
            gradient = gradient / (1 + keras.ops.norm(gradient))
        super().update_step(gradient, variable, learning_rate)


@way("It computes something else than process . at step 1: .*; there ")
def another_sum_in_the_optimizer(odd):
    if odd:
        os.environ["ODD"] = "1"
    fit(build(Normed(0.05), units=256, shard="weights"))


class InTurn(keras.layers.Layer):
    """Calls its layers in an order of the process's own, as of a `set` of names."""

    def __init__(self):
        super().__init__()
        self.layers = [keras.layers.Dense(8, "tanh") for _ in range(2)]

    def build(self, shape):
        for layer in self.layers:
            layer.build((*shape[:-1], 8))

    def call(self, inputs):
        inputs = keras.ops.repeat(inputs, 8, axis=-1)[..., :8]
        for layer in self.layers[:: -1 if "ODD" in os.environ else 1]:
            inputs = layer(inputs)
        return inputs


@way("It computes something else than process . at step .: .*; there ")
def layers_in_another_order(odd):
    if odd:
        os.environ["ODD"] = "1"
    fit(build(first=lambda *_, **__: InTurn()))


@way("It computes .* of a sum of 2; there .* of a sum of 1" if ON_TENSORFLOW else None)
def sets_a_variable_of_its_own(odd):
    """A weight of a loss, say, that a callback changes. On JAX it is a constant of the step."""
    scale = keras.Variable(1.0, trainable=False)

    class Scaled(keras.layers.Dense):
        def call(self, inputs):
            return scale * super().call(inputs)

    fit(build(first=Scaled), callbacks=at(odd, "on_epoch_end", lambda _: scale.assign(2.0)))


@way(STATE)
def shifts_a_seed(odd):
    """The state of random numbers, which is no weight."""
    keras.utils.set_random_seed(7)
    layers = [keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dropout(0.5, seed=3)]
    model = make_parallel(keras.Sequential([*layers, keras.layers.Dense(2)]))
    model.compile("sgd", "mse")

    def action(_):
        model.layers[1].seed_generator.state.assign([3, 1])

    fit(model, callbacks=at(odd, "on_epoch_begin", action))


@way(STATE)
def sets_weights_while_predicting(odd):
    """In a call of a few steps, after which nothing comes."""
    callbacks = at(odd, "on_predict_batch_end", _shift, 0)
    build().predict(numbers()[0], batch_size=BATCH, verbose=0, callbacks=callbacks)


@way(STATE)
def sets_weights_before_it_saves(odd):
    model, (x, y) = build(), numbers()
    for _ in range(3):
        model.train_on_batch(x[:BATCH], y[:BATCH])
    if odd:
        _shift(model)
    model.save_weights("never.weights.h5")


def _in_parts(odd):
    """A trained model whose large weight is in parts, of which the odd process sets its own."""
    model = build(units=256, shard="weights")
    fit(model)
    if odd:
        kernel = model.trainable_variables[0]
        kernel.assign(np.full(kernel.shape, 0.5))
    return model


@way(STATE)
def sets_a_weight_in_parts_before_it_saves(odd):
    _in_parts(odd).save_weights("never.weights.h5")


@way(STATE)
def sets_a_weight_in_parts_before_all_read_it(odd):
    model = _in_parts(odd)
    model.get_weights()
    model.save_weights("never.weights.h5")


@way(STATE)
def sets_a_small_weight_beside_parts(odd):
    def set_bias(model):
        bias = model.trainable_variables[1]
        bias.assign(bias + 0.5)

    model = build(units=256, shard="weights")
    fit(model, epochs=1, callbacks=at(odd, "on_epoch_end", set_bias, 0))


@way("It has stopped with ValueError: odd", own="ValueError")
def raises_while_the_others_save(odd):
    model = build(units=256, shard="weights")
    raising = at(odd, "on_epoch_end", raises(ValueError("odd")), 1)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/saved.weights.h5"
        saving = keras.callbacks.ModelCheckpoint(path, save_weights_only=True)
        fit(model, callbacks=[saving, *raising])


@way(STATE)
def sets_another_weight_to_the_same(odd):
    """All set one of several weights that are alike."""

    def set_one(model):
        kernel = model.trainable_variables[2 if odd else 4]
        kernel.assign(kernel * 0)

    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(6) for _ in range(3)]
    model = make_parallel(keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(2)]))
    model.compile("adam", "mse")
    fit(model, epochs=1, callbacks=at(True, "on_train_batch_end", set_one, 1))


@way("Its compilation is ")
def another_loss(odd):
    fit(build(loss="mae" if odd else "mse"))


@way("Its compilation is ")
def several_steps_at_once(odd):
    fit(build(steps_per_execution=2 if odd else 1))


@way("Its compilation is ")
def runs_eagerly(odd):
    fit(build(run_eagerly=odd))


@way("Its compilation is ")
def compiles_otherwise(odd):
    fit(build(jit_compile=odd))


@way("Its model is ")
def computes_in_half_precision(odd):
    keras.config.set_dtype_policy("mixed_float16" if odd else "float32")
    fit(build())


@way("Its model is |Its compilation is |Its weights|Its state")
def compiles_again(odd):
    model = build()
    fit(model)
    if odd:
        model.compile("adam", "mse")
    fit(model)


# Several steps at once, eager steps


@way("Its range of epochs is 0 to 2. In process . it is 0 to 3")
def fewer_epochs_of_several_steps(odd):
    fit(build(steps_per_execution=4), epochs=2 if odd else 3)


@way("It is at the end of `fit`, after 4 steps")
def a_generator_ends_within_several_steps(odd):
    fit(build(steps_per_execution=3), batches(4 if odd else 6), epochs=1)


@way("Its range of epochs is 0 to 2. In process . it is 0 to 3")
def fewer_epochs_eagerly(odd):
    fit(build(run_eagerly=True), epochs=2 if odd else 3)


@way(STATE)
def sets_the_rate_eagerly(odd):
    callbacks = at(odd, "on_epoch_end", _set_rate)
    fit(build(run_eagerly=True), epochs=10, callbacks=callbacks)


# Parts


def _part(odd, rows=48):
    return numbers(rows, seed=20 + odd)


@way("Its range of epochs is 0 to 2. In process . it is 0 to 3", data="parts")
def parts_for_fewer_epochs(odd):
    fit(build(), *_part(odd), batch_size=BATCH, epochs=2 if odd else 3)


@way("It is at another place in its data|It makes another step", data="parts")
def parts_of_fewer_batches(odd):
    fit(build(), *_part(odd, 40 if odd else 48), batch_size=BATCH)


@way("It makes another step|It is at", data="parts")
def parts_validated(odd):
    fit(build(), *_part(odd), batch_size=BATCH, validation_data=_few() if odd else None)


@way("Its class_weight is ", data="parts")
def parts_of_other_class_weights(odd):
    x, y = _part(odd)
    model = build(loss="sparse_categorical_crossentropy")
    y = (y[:, 0] > 0).astype("int32")
    fit(model, x, y, batch_size=BATCH, class_weight={0: 1.0, 1: 3.0 if odd else 2.0})


@way("Its class_weight is |It is at the beginning of single steps", data="parts")
def single_steps_of_other_class_weights(odd):
    x, _ = _part(odd)
    model = build(loss="sparse_categorical_crossentropy")
    for step in range(4):
        weights = {0: 1.0, 1: 3.0 if odd and step > 1 else 2.0}
        model.train_on_batch(x[:8], np.arange(8) % 2, class_weight=weights)
        model.test_on_batch(x[:8], np.arange(8) % 2)


@way("Its part of a batch does not fit", data="parts")
def parts_of_another_type(odd):
    x, y = _part(odd)
    fit(build(), np.round(x).astype("int32" if odd else "float32"), y, batch_size=BATCH)


@way(STATE, data="parts")
def parts_with_another_rate(odd):
    callbacks = at(odd, "on_epoch_end", _set_rate)
    fit(build(), *_part(odd), batch_size=BATCH, epochs=10, callbacks=callbacks)


@way("It is at .*of `evaluate`|It is at another", data="parts")
def parts_evaluated_longer(odd):
    build().evaluate(*_part(odd, 48 if odd else 32), batch_size=BATCH, verbose=0)


# What is no fault


@way(None)
def nothing(odd):
    model = build()
    fit(model, validation_data=_few())
    model.predict(_few()[0], verbose=0)


@way(None)
def is_slow(odd):
    model = build()
    callbacks = at(odd, "on_epoch_end", lambda model: time.sleep(4))
    fit(model, validation_data=_few(), callbacks=callbacks)
    fit(model, callbacks=at(odd, "on_train_batch_end", lambda model: time.sleep(2)))


@way(None)
def its_data_are_slow(odd):
    def generate():
        for number, one in enumerate(batches()):
            time.sleep(3 * odd * (number in (0, 5)))
            yield one
        time.sleep(3 * odd)

    fit(build(), generate(), epochs=1)
    fit(build(steps_per_execution=4), generate(), epochs=1)


@way(None)
def looks_and_saves(odd):
    path = f"/tmp/out_of_step_{os.getpid()}.weights.h5"

    def look(model):
        model.get_weights()
        model.template.predict(_few()[0], verbose=0)
        model.template.save_weights(path)

    fit(build(), epochs=5, callbacks=at(odd, "on_epoch_end", look))


@way(None)
def all_fail_and_go_on(odd):
    """The same error in all, in one of them later: while a step is traced, and in a callback."""
    os.environ["LATE"] = "2.5" if odd else "0"  # what a metric holds is compared

    def fail(*_):
        time.sleep(float(os.environ["LATE"]))
        raise ArithmeticError("on purpose")

    failing = {"metrics": [fail]}, {"callbacks": at(True, "on_epoch_end", fail)}
    for compiled, fitted in ((failing[0], {}), ({}, failing[1])):
        try:
            fit(build(**compiled), **fitted)
        except ArithmeticError:
            fit(build())
