"""The census data of lesson 14: the real files, or generated ones like them.

The real ones are "Census Income (Adult)" of the UCI Machine Learning Repository
(Becker and Kohavi, 1996; CC BY 4.0): 32,561 people of 1994. If the environment
variable CENSUS_DIR names a folder with `train*.csv` and `eval*.csv`, each with
the header `COLUMNS`, they are used. Else `write` GENERATES people: columns and
shares like those of the real file, nobody real, and an income by the rule
`score`, which the real world does not follow.
"""

import csv
import os
import sys
from pathlib import Path

import numpy as np

COLUMNS = (
    "age workclass fnlwgt education education_num marital_status occupation "
    "relationship race sex capital_gain capital_loss hours_per_week "
    "native_country income"
).split()
LABEL = "income"

# Shares in per cent, rounded, as in the real file. "?" is a missing value.
SHARES = {
    "workclass": {
        "Private": 74,
        "Self-emp-not-inc": 8,
        "Local-gov": 7,
        "State-gov": 4,
        "Self-emp-inc": 4,
        "Federal-gov": 3,
    },
    "education": {
        "Preschool": 0.2,
        "1st-4th": 0.5,
        "5th-6th": 1,
        "7th-8th": 2,
        "9th": 1.6,
        "10th": 2.9,
        "11th": 3.6,
        "12th": 1.3,
        "HS-grad": 32.4,
        "Some-college": 22.4,
        "Assoc-voc": 4.2,
        "Assoc-acdm": 3.2,
        "Bachelors": 16.5,
        "Masters": 5.2,
        "Prof-school": 1.7,
        "Doctorate": 1.3,
    },
    "occupation": {
        "Prof-specialty": 12.8,
        "Craft-repair": 12.5,
        "Exec-managerial": 12.3,
        "Adm-clerical": 11.8,
        "Sales": 11.2,
        "Other-service": 10.2,
        "Machine-op-inspct": 6.1,
        "?": 5.6,
        "Transport-moving": 4.9,
        "Handlers-cleaners": 4.1,
        "Farming-fishing": 3.1,
        "Tech-support": 2.8,
        "Protective-serv": 2.1,
        "Priv-house-serv": 0.5,
    },
    "race": {
        "White": 85.5,
        "Black": 9.5,
        "Asian-Pac-Islander": 3.1,
        "Amer-Indian-Eskimo": 1.1,
        "Other": 0.8,
    },
    "sex": {"Male": 67, "Female": 33},
    "native_country": {
        "United-States": 89.7,
        "Mexico": 2,
        "?": 1.8,
        "Philippines": 0.6,
        "Germany": 0.5,
        "Canada": 0.4,
        "India": 0.3,
        "Other-country": 4.7,
    },
}
EDUCATIONS = list(SHARES["education"])
OCCUPATIONS = list(SHARES["occupation"])
SINGLE = {
    "Divorced": 68,
    "Separated": 15,
    "Widowed": 13,
    "Married-spouse-absent": 4,
}
ALONE = {
    "Not-in-family": 62,
    "Unmarried": 26,
    "Own-child": 7,
    "Other-relative": 5,
}


def exceptions() -> np.ndarray:
    """What each pair of occupation and education adds to the score: noise.

    No other pair says anything about it, so that it can only be memorized.
    """
    shape = len(OCCUPATIONS), len(EDUCATIONS)
    return np.random.default_rng(1994).normal(0, 1.4, shape)


def score(rows: dict[str, np.ndarray]) -> np.ndarray:
    """The logarithm of the odds of an income of over 50K, by our rule.

    Education and long hours pay with experience only, which grows to the age
    of 48 and then falls: a smooth product of three numbers, for a network to
    generalize from. The exceptions are for a table to memorize. Neither race
    nor sex counts.
    """
    experience = np.exp(-(((rows["age"] - 48) / 13) ** 2))
    pays = 0.45 * (rows["education_num"] - 7) + 0.07 * (
        rows["hours_per_week"] - 40
    )
    occupation = [OCCUPATIONS.index(name) for name in rows["occupation"]]
    pair = exceptions()[occupation, rows["education_num"] - 1]
    married = rows["marital_status"] == "Married-civ-spouse"
    gains = np.where(rows["capital_gain"] > 5000, 3.0, 0.0)
    return 2.0 * experience * pays + pair + 1.0 * married + gains - 3.85


def people(number: int, seed: int) -> dict[str, np.ndarray]:
    """Generated people, as columns."""
    rng = np.random.default_rng(seed)

    def draw(shares: dict[str, float]) -> np.ndarray:
        weights = np.array(list(shares.values()))
        return rng.choice(list(shares), number, p=weights / weights.sum())

    rows = {name: draw(shares) for name, shares in SHARES.items()}
    rows["age"] = np.minimum(17 + rng.gamma(2.4, 9.0, number), 90).astype(int)
    indices = [EDUCATIONS.index(name) for name in rows["education"]]
    rows["education_num"] = np.array(indices) + 1
    # Those without an occupation have no class of work either.
    none = rows["occupation"] == "?"
    rows["workclass"] = np.where(none, "?", rows["workclass"])
    young = 1 / (1 + np.exp((rows["age"] - 28) / 5))
    male = rows["sex"] == "Male"
    married = rng.random(number) < (1 - young) * np.where(male, 0.84, 0.23)
    never = ~married & (rng.random(number) < young + 0.25 * (1 - young))
    rows["marital_status"] = np.select(
        [married, never],
        ["Married-civ-spouse", "Never-married"],
        draw(SINGLE),
    )
    rows["relationship"] = np.select(
        [married & male, married, never & (rows["age"] < 25)],
        ["Husband", "Wife", "Own-child"],
        draw(ALONE),
    )
    hours = rng.normal(40.5, 16, number).clip(1, 99).round().astype(int)
    rows["hours_per_week"] = np.where(rng.random(number) < 0.47, 40, hours)
    for name, share, middle in (
        ("capital_gain", 0.084, 6000),
        ("capital_loss", 0.046, 1900),
    ):
        some = np.exp(rng.normal(np.log(middle), 0.6, number)).astype(int)
        rows[name] = np.where(rng.random(number) < share, some, 0)
    rows["fnlwgt"] = np.exp(rng.normal(12.0, 0.5, number)).astype(int)
    chance = 1 / (1 + np.exp(-score(rows)))
    rich = rng.random(number) < chance
    rows[LABEL] = np.where(rich, ">50K", "<=50K")
    return rows


def write(path: Path, number: int, seed: int) -> None:
    """Writes a CSV file of generated people, with a header."""
    rows = people(number, seed)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(zip(*(rows[name] for name in COLUMNS), strict=True))


def files(folder: Path) -> tuple[str, str]:
    """Patterns of the files to train on and to evaluate on.

    Args:
        folder: where to write generated files, if CENSUS_DIR is not set.
    """
    real = os.environ.get("CENSUS_DIR")
    if real:
        return f"{real}/train*.csv", f"{real}/eval*.csv"
    for part in range(8):
        write(folder / f"train-{part}.csv", 3000, seed=part)
    write(folder / "eval.csv", 8000, seed=100)
    return f"{folder}/train-*.csv", f"{folder}/eval.csv"


if __name__ == "__main__":
    files(Path(sys.argv[1]))
