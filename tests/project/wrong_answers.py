"""Answers that look right, for the tests of the course."""

# By lesson and exercise. The empty one is `...`.
WRONG = {
    "01": {
        1: ['answer_1 = "worker"'],
        2: [
            "answer_2 = json.dumps({'cluster': jobs, 'task': "
            "{'type': 'ps', 'index': 1}})",
            "answer_2 = '{'",
            "answer_2 = json.dumps({'cluster': jobs | {'worker': "
            "['w1:2222', 'w2:2222']}, 'task': {'type': 'ps', 'index': 2}})",
        ],
        3: [
            "answer_3 = lambda gradients, sizes: np.mean(gradients, axis=0)",
            "answer_3 = lambda gradients, sizes: 0.0",
        ],
        4: [
            "answer_4 = '/job:ps/task:1', {'chief:0': [0], 'ps:0': [-9], "
            "'ps:1': [], 'worker:0': [-9]}",
            "answer_4 = '/job:ps/task:1'",
        ],
        5: ["answer_5 = 'Four times as fast.'"],
    },
    "02": {
        1: ["answer_1 = [0, 1, 0, 1]", "answer_1 = 0"],
        2: [
            "answer_2 = [(300,)] + [(100,)] * 6",
            "answer_2 = [(100,)] * 12 + [(600,)]",
        ],
        3: ["answer_3 = 9", "answer_3 = 13"],
        4: [
            "answer_4 = {'round_robin': 1050624, 'greedy': 787456, "
            "'planned': 527364}",
            "answer_4 = 3",
        ],
        5: ["answer_5 = 'The network is slow.'"],
    },
    "03": {
        1: ["answer_1 = 1", "answer_1 = 3"],
        2: [
            "answer_2 = 2 * 512 * 3 * (20 * 4 + 8)",
            "answer_2 = 1200 * (20 * 4 + 8)",
        ],
        3: ["answer_3 = 7", "answer_3 = 9"],
        4: [
            "answer_4 = ['chief:0', 'ps:0', 'ps:1', 'worker:0'], rows",
            "answer_4 = ['ps:0', 'ps:1', 'ps:2'], []",
        ],
        5: ["answer_5 = 'Hashing is bad.'"],
    },
    "04": {
        1: ["answer_1 = 16"],
        2: ["answer_2 = 0.4", "answer_2 = 0.25"],
        3: [
            "answer_3 = lambda log: [0 for what, _ in log if what == 'push']",
            "answer_3 = lambda log: [len(log)]",
        ],
        4: [
            "answer_4 = {'slow': False, 'updates': [0, 0, 50, 250]}",
            "answer_4 = 7",
        ],
        5: ["answer_5 = 'It depends.'"],
    },
    "05": {
        1: ["answer_1 = 2 * 400", "answer_1 = 7 * 400 / 8"],
        2: ["answer_2 = 1 / 0.25", "answer_2 = 1 / 0.09 + 1 / 0.1 + 1 / 0.25"],
        3: [
            "answer_3 = lambda secs, n: secs.max(axis=1).mean()",
            "answer_3 = lambda secs, n: np.sort(secs, axis=1)[:, :n].mean()",
        ],
        4: ["answer_4 = [60, 120, 180]", "answer_4 = [50, 50, 50]"],
        5: ["answer_5 = 'Nothing.'"],
    },
    "06": {
        1: ["answer_1 = 27", "answer_1 = 35"],
        2: ["answer_2 = 6 * 20 * 5", "answer_2 = 20 * 5"],
        3: [
            "answer_3 = lambda secs, n: [secs[: len(secs) // n], "
            "secs[len(secs) // n :]]",
            "answer_3 = lambda secs, n: [sorted(secs)[i::n] for i in range(n)]",
        ],
        4: ["answer_4 = [24, 8]", "answer_4 = [8, 16]", "answer_4 = 8"],
        5: ["answer_5 = 'Two pipelines.'"],
    },
    "07": {
        1: ["answer_1 = 10", "answer_1 = 7 + (10 - 6)"],
        2: [
            "answer_2 = 101 * 24 / 1000 * 5",
            "answer_2 = 21 * 24 / 1000 * 10",
        ],
        3: [
            "answer_3 = tfdist.SessionRunHook()",
            "answer_3 = tfdist.StopAtStepHook(last_step=10)",
        ],
        4: [
            "answer_4 = []",
            "answer_4 = ["
            "{'what': 'session', 'step': 0}, {'what': 'steps', 'step': 120}, "
            "{'what': 'session', 'step': 100}, {'what': 'end', 'step': 700}]",
        ],
        5: ["answer_5 = 'Yes, they are cheaper.'"],
    },
    "08": {
        1: ["answer_1 = (1 / 8) ** 8", "answer_1 = 1 / 8"],
        2: ["answer_2 = 256", "answer_2 = 256 * (1 + 2)"],
        3: [
            "answer_3 = lambda read, n: ([], [])",
            "answer_3 = lambda read, n: "
            "(sorted(set(read[0]) & set(read[1])), "
            "sorted(set(range(n)) - set(read[0]) - set(read[1])))",
        ],
        4: [
            "answer_4 = {'data_worker:0': [-9]}, "
            "{'kind': 'disturbed', 'examples': [1] * 400}",
            "answer_4 = {'data_worker:0': [-9]}, "
            "{'kind': 'shares', 'examples': [1] * 380 + [0] * 20}",
            "answer_4 = {'data_worker:0': [], 'worker:1': [-9]}, "
            "{'kind': 'disturbed', 'examples': [1] * 388 + [0] * 12}",
        ],
        5: ["answer_5 = 'Shares, always.'", "answer_5 = 3"],
    },
    "09": {
        1: ["answer_1 = [40, 50]", "answer_1 = [10, 20, 40]"],
        2: [
            "answer_2 = lambda best_eval_result, current_eval_result: ("
            "current_eval_result['auc'] >= best_eval_result['auc'])",
            "answer_2 = lambda best, current: current['auc'] > best['auc']",
        ],
        3: [
            "answer_3 = lambda saved, takes, throttle_secs: saved",
            "answer_3 = lambda saved, takes, throttle_secs: saved[:: max("
            "1, (takes + throttle_secs) // 10)]",
        ],
        4: [
            "answer_4 = {'codes': {'chief:0': [0], 'evaluator:0': [-9, 0]}, "
            "'records': []}",
            "answer_4 = {'codes': {'chief:0': [-9, 0], 'evaluator:0': []}, "
            "'records': [{'evaluated': 30, 'from': 1}, "
            "{'evaluated': 30, 'from': 3}, {'trained': [[2, 30]]}]}",
        ],
        5: ["answer_5 = 'BestExporter.'"],
    },
    "10": {
        1: ["answer_1 = 8", "answer_1 = 8 * 0.2 / (0.2 + 0.1 / 1.25)"],
        2: ["answer_2 = [200, 100]", "answer_2 = 200"],
        3: [
            'answer_3 = ["mirrored", "ps", "mirrored", "mirrored"]',
            "answer_3 = 4",
        ],
        4: [
            "answer_4 = [{'limited': True}, "
            "{'bytes': 2002000, 'workers': 3, 'pace': 23.0}, "
            "{'bytes': 2002000, 'workers': 4, 'pace': 33.0}]",
            "answer_4 = [{'limited': True}, "
            "{'bytes': 40040, 'workers': 3, 'pace': 23.0}, "
            "{'bytes': 40040, 'workers': 4, 'pace': 24.0}]",
        ],
        5: ["answer_5 = 'The network.'"],
    },
    "11": {
        1: [
            'answer_1 = "/job:worker/task:1"',
            "answer_1 = 2",
            'answer_1 = "ps:1"',
        ],
        2: [
            "answer_2 = Job(image=image, base_output_dir=bucket, workers=4, "
            "machine=Machine(machine_type='n1-standard-16', "
            "accelerator_type='NVIDIA_TESLA_T4', accelerator_count=2), "
            "spot=True, timeout_secs=21600)",
            "answer_2 = Job(image=image, base_output_dir=bucket, workers=3, "
            "spot=True, timeout_secs=21600)",
        ],
        3: [
            "answer_3 = 'worker_pool_specs: []'",
            "answer_3 = '{'",
        ],
        4: [
            "answer_4 = {'replica': 'chief 0', 'code': 0, 'saves': 1.0}",
            "answer_4 = {'replica': 'worker 0', 'code': 134}",
        ],
        5: ["answer_5 = 'No.'"],
    },
    "12": {
        1: [
            "answer_1 = keras.optimizers.Adam(0.01)",
            "answer_1 = keras.optimizers.Adam(0.001, epsilon=1e-8)",
            "answer_1 = keras.optimizers.Adam(0.01, 0.5, epsilon=1e-8)",
        ],
        2: [
            "answer_2 = lambda table, n: [table[i::n] for i in range(n)]",
            "answer_2 = lambda table, n: np.array_split(table[::-1], n)",
        ],
        3: [
            "def answer_3():\n"
            "    x = keras.Input([2], name='x')\n"
            "    net = keras.layers.Dense(4, 'tanh')(x)\n"
            "    model = keras.Model({'x': x}, keras.layers.Dense(3)(net))\n"
            "    model.compile(keras.optimizers.SGD(0.1), "
            "'sparse_categorical_crossentropy')\n"
            "    return model",
            "answer_3 = keras.Model",
            "def answer_3():\n"
            "    x = keras.Input([2], name='x')\n"
            "    net = keras.layers.Dense(4, 'tanh')(x)\n"
            "    net = keras.layers.Dense(3, 'softmax')(net)\n"
            "    model = keras.Model({'x': x}, net)\n"
            "    model.compile(keras.optimizers.SGD(0.1), "
            "'sparse_categorical_crossentropy')\n"
            "    return model",
        ],
        4: [
            "answer_4 = {'codes': dict.fromkeys(['worker:0', 'worker:1']), "
            "'record': {'global_step': 300, 'auc': 0.88}}",
            "answer_4 = {'codes': {f'worker:{i}': [0] for i in range(3)}, "
            "'record': {'global_step': 302, 'auc': 0.88}}",
        ],
        5: ["answer_5 = 'It is right.'"],
    },
    "13": {
        1: [
            "answer_1 = 3.0, [4.0, 8.0]",
            "answer_1 = [2.0, 4.0], 6.0",
        ],
        2: [
            "answer_2 = lambda errors, total: tf.reduce_mean(errors)",
            "answer_2 = lambda errors, total: tf.reduce_sum(errors)",
        ],
        3: [
            "answer_3 = lambda context: tf.data.Dataset.range(64).batch("
            "context.get_per_replica_batch_size(16))",
            "answer_3 = lambda context: tf.data.Dataset.range(64).shard("
            "context.num_input_pipelines, context.input_pipeline_id).batch(16)",
            "answer_3 = lambda context: tf.data.Dataset.range(64).shard("
            "context.num_input_pipelines, context.input_pipeline_id).repeat()"
            ".batch(2)",
        ],
        4: [
            "answer_4 = {task: {'steps': 40, 'kernel': [1.0, 1.0]} "
            "for task in ('chief:0', 'worker:0')}",
            "answer_4 = {task: {'steps': 40, 'kernel': [1.0, x]} "
            "for x, task in enumerate(('chief:0', 'worker:0', 'worker:1'))}",
        ],
        5: ["answer_5 = 'Take tfdist.'"],
    },
    "14": {
        1: ["answer_1 = 9 / 7", "answer_1 = 3 / 12"],
        2: ["answer_2 = 5290", "answer_2 = 9 + 60 + 220 + 5000 + 1"],
        3: [
            "answer_3 = lambda runs: min(runs, key=lambda run: run[2])[0]",
            "answer_3 = lambda runs: runs[0][0]",
        ],
        4: [
            "answer_4 = {'ps:1': [0], 'chief:0': [0]}, {1200: {'auc': 0.9}}",
            "answer_4 = 0.85",
        ],
        5: ["answer_5 = 'More seeds.'"],
    },
}
