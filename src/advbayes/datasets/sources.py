"""The built-in sets: what their files contain (size and SHA-256 of the unpacked bytes) and where
they come from.

Hashes are of the content, not of the container: the same MNIST is about in many differently packed
`.gz` files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Content:
    """The bytes of one file, unpacked. With `decimals`, the numbers decide, not their spelling."""

    name: str
    size: int
    sha256: str
    decimals: int | None = None


@dataclass(frozen=True)
class Source:
    """One data set's files. `other_copies`: complete copies with other content exist and are
    accepted, but marked."""

    name: str
    summary: str
    licence: str
    homepage: str
    folders: tuple[str, ...]  # below a root; the first is where downloads go and what a mirror has
    contents: tuple[Content, ...]
    remotes: Mapping[str, tuple[str, ...]]  # each file to fetch with its addresses
    class_names: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()  # of a regression: columns of its table
    header: tuple[str, ...] | None = None  # of a table that does not name its columns
    other_copies: bool = False
    hint: str = ""

    @property
    def task(self) -> str:
        return "classification" if self.class_names else "regression"

    @property
    def archive(self) -> str | None:
        """A .tar.gz that may stand for the contents."""
        return next((file for file in self.remotes if file.endswith((".tar.gz", ".tgz"))), None)

    def inside(self, file: str) -> tuple[str, ...]:
        """The contents of a file: of the archive all, of another the one that it is named after."""
        names = tuple(content.name for content in self.contents)
        return names if file == self.archive else (file.removesuffix(".gz"),)

    @property
    def limit(self) -> int:
        """No file of this set is larger than this."""
        return 2 * sum(content.size for content in self.contents) + (1 << 20)


def _idx(
    name: str,
    summary: str,
    licence: str,
    homepage: str,
    folders: tuple[str, ...],
    bases: tuple[str, ...],
    class_names: tuple[str, ...],
    hashes: str,
) -> Source:
    files = (
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        "t10k-images-idx3-ubyte",
        "t10k-labels-idx1-ubyte",
    )
    sizes = (47_040_016, 60_008, 7_840_016, 10_008)
    contents = tuple(Content(*row) for row in zip(files, sizes, hashes.split(), strict=True))
    remotes = {f"{file}.gz": tuple(f"{base}/{file}.gz" for base in bases) for file in files}
    return Source(name, summary, licence, homepage, folders, contents, remotes, class_names)


def _wine(name: str, colour: str, rows: int, size: int, sha256: str) -> Source:
    file = f"winequality-{colour}.csv"
    return Source(
        name,
        f"quality of {rows:,} {colour} wines from 11 measurements",
        "CC BY 4.0",
        "https://archive.ics.uci.edu/dataset/186/wine+quality",
        ("wine-quality", "."),
        (Content(file, size, sha256),),
        {file: (f"{_UCI}/ml/machine-learning-databases/wine-quality/{file}",)},
        targets=("quality",),
    )


_UCI = "https://archive.ics.uci.edu"
_WINE = "4a402cf041b025d4566d954c3b9ba8635a3a8a01e039005d97d6a710278cf05e"
_WHITE = "76c3f809815c17c07212622f776311faeb31e87610d52c26d87d6e361b169836"
_ENERGY = "4c80b7dc02a0df1760aadef599ac6f02848d486b2a618c672b53004db7c57f07"
_HOUSING = "a2b44dcc7e1c9091b43c4f458b25cbd1f7e8068d08edd26bc4703108d3fa6214"
# Of the members of the official archive (MD5 c32a1d4ab5d03f1284b67883e8d87530 on its page), as
# other libraries check them.
_CIFAR_HASHES = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}

_TABLE = (
    _idx(
        "mnist",
        "70,000 handwritten digits, 28x28 grey",
        "CC BY-SA 3.0",
        "http://yann.lecun.com/exdb/mnist/",
        ("mnist", "MNIST/raw"),
        (
            "https://ossci-datasets.s3.amazonaws.com/mnist",
            "https://storage.googleapis.com/cvdf-datasets/mnist",
        ),
        tuple("0123456789"),
        """ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db
           65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5
           0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7
           ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2""",
    ),
    _idx(
        "fashion-mnist",
        "70,000 pictures of clothes, 28x28 grey",
        "MIT",
        "https://github.com/zalandoresearch/fashion-mnist",
        ("fashion-mnist", "FashionMNIST/raw"),
        (
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
        ),
        (
            *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
            *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        ),
        """c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888
           bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9
           5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b
           0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34""",
    ),
    Source(
        "cifar10",
        "60,000 photographs in 10 classes, 32x32 colour",
        "not stated by its authors",
        "https://www.cs.toronto.edu/~kriz/cifar.html",
        ("cifar10", "cifar10/cifar-10-batches-bin", "cifar-10-batches-bin", "."),
        tuple(Content(file, 30_730_000, sha256) for file, sha256 in _CIFAR_HASHES.items()),
        {"cifar-10-binary.tar.gz": ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",)},
        (
            *("airplane", "automobile", "bird", "cat", "deer"),
            *("dog", "frog", "horse", "ship", "truck"),
        ),
        other_copies=True,
        hint="The binary version is read (cifar-10-binary.tar.gz or its data_batch_*.bin), not "
        "the pickled Python one.",
    ),
    _wine("wine", "red", 1_599, 84_199, _WINE),
    _wine("wine-white", "white", 4_898, 264_426, _WHITE),
    Source(
        "energy",
        "heating (Y1) and cooling (Y2) load of 768 buildings from 8 properties",
        "CC BY 4.0",
        "https://archive.ics.uci.edu/dataset/242/energy+efficiency",
        ("energy-efficiency", "."),
        (Content("ENB2012_data.csv", 33_488, _ENERGY, decimals=2),),
        {"ENB2012_data.csv": (f"{_UCI}/static/public/242/data.csv",)},
        targets=("Y1", "Y2"),
        hint="Its published file is a spreadsheet: save the sheet as ENB2012_data.csv with the "
        "header X1,X2,X3,X4,X5,X6,X7,X8,Y1,Y2 and the 768 rows.",
    ),
    Source(
        "california",
        "median house value of 20,640 districts from 8 properties",
        "not stated by its authors (StatLib)",
        "https://www.dcc.fc.up.pt/~ltorgo/Regression/cal_housing.html",
        ("california-housing", "CaliforniaHousing", "."),
        (Content("cal_housing.data", 2_071_484, _HOUSING),),
        {
            "cal_housing.tgz": (
                "https://ndownloader.figshare.com/files/5976036",
                "https://www.dcc.fc.up.pt/~ltorgo/Regression/cal_housing.tgz",
            )
        },
        targets=("medianHouseValue",),
        header=(
            *("longitude", "latitude", "housingMedianAge", "totalRooms", "totalBedrooms"),
            *("population", "households", "medianIncome", "medianHouseValue"),
        ),
    ),
)

SOURCES: dict[str, Source] = {source.name: source for source in _TABLE}
