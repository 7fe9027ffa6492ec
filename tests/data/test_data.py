import io
import os
import pickle
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from qbi.data.builtin_text import builtin_text
from qbi.data.cifar10 import load_cifar10
from qbi.data.folder import load_image_folder, load_imagenet
from qbi.data.images import denormalised, normalised
from qbi.data.open import open_images
from qbi.data.photos import MEAN, STD, synthetic_photos
from qbi.data.text import Corpus, load_imdb, load_text, word_tokens
from qbi.errors import DataError
from qbi.files import to_json, write_atomically
from qbi.lab.wordpiece import train_wordpiece, wordpiece_tokens


def test_photos_are_the_same_for_the_same_seed_whatever_their_number():
    few, many = synthetic_photos(3, 24, seed=5), synthetic_photos(40, 24, seed=5)
    assert torch.equal(few.pixels, many.pixels[:3])
    assert not torch.equal(few.pixels, synthetic_photos(3, 24, seed=6).pixels)
    assert set(many.labels.tolist()) == {0, 1, 2}


def test_photos_have_the_statistics_of_natural_images():
    photos = synthetic_photos(200, 64, seed=9)
    x = photos.pixels.double() / 255
    assert x.mean((0, 2, 3)).tolist() == pytest.approx(MEAN, abs=0.02)
    assert x.transpose(0, 1).flatten(1).std(1).tolist() == pytest.approx(STD, abs=0.02)
    # Power falls with frequency about as 1/f² and neighbours agree; white noise would give a slope of 0.
    grey = x.mean(1) - x.mean((1, 2, 3), keepdim=True)[:, 0]
    power = torch.fft.rfft2(grey).abs().square().mean(0)[0, 1:32]
    frequency = torch.arange(1, 32).double()
    slope = np.polyfit(frequency.log().numpy(), power.log().numpy(), 1)[0]
    assert -2.8 < slope < -1.4
    # Channels agree, as in photos.
    channels = torch.corrcoef(x.transpose(0, 1).flatten(1))
    assert channels.min() > 0.8


def test_normalising_and_back():
    photos = synthetic_photos(4, 16)
    x = normalised(photos, slice(None))
    torch.testing.assert_close(denormalised(photos, x.flatten(1)), photos.pixels.float() / 255)


def test_builtin_text_is_english_enough():
    corpus = builtin_text()
    assert len(corpus.texts) > 1000
    data = word_tokens(corpus, length=60, vocabulary=5000)
    assert data.tokens.shape == (len(corpus.texts), 60)
    assert {"the", "is", "return"} <= set(data.vocabulary)
    assert int(data.tokens.max()) < len(data.vocabulary) <= 5000
    assert [data.vocabulary[i] for i in data.tokens[0, :3].tolist()] == ["command", "-", "line"]


def test_wordpiece_ids_are_stable():
    texts = builtin_text().texts[:300]
    first, again = train_wordpiece(texts, 800), train_wordpiece(texts, 800)
    assert first == again
    assert first[0] == "[PAD]"
    data = wordpiece_tokens(Corpus("t", texts, (0,) * 300, ("a",)), length=40, vocabulary=800)
    assert data.tokens.shape == (300, 40)
    assert (data.tokens[:, 0] == data.vocabulary.index("[CLS]")).all()


def test_real_cifar10(cifar):
    assert cifar.pixels.shape == (6102, 3, 32, 32)
    assert cifar.labels.bincount().min() > 500
    x = normalised(cifar, slice(0, 2000))
    assert abs(float(x.mean())) < 0.05
    assert float(x.std()) == pytest.approx(1, abs=0.05)


# Made-up data in the published layouts, and every way to damage it.


def save_image(path, size=(20, 30), colour=(200, 30, 60)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def python2_batch(count=4):
    """A batch as Python 2 pickled it: bytes for strings, protocol 2."""
    data = np.arange(count * 3072, dtype=np.uint8).reshape(count, 3072)
    return pickle.dumps({b"data": data, b"labels": list(range(count))}, protocol=2)


def test_cifar10_pickles_and_binary_agree(tmp_path):
    pickled, binary = tmp_path / "cifar-10-batches-py", tmp_path / "binary"
    pickled.mkdir()
    binary.mkdir()
    (pickled / "data_batch_1").write_bytes(python2_batch())
    data = np.arange(4 * 3072, dtype=np.uint8).reshape(4, 3072)
    records = np.concatenate([np.arange(4, dtype=np.uint8)[:, None], data], 1)
    (binary / "data_batch_1.bin").write_bytes(records.tobytes())
    first, second = load_cifar10(pickled), load_cifar10(binary)
    assert torch.equal(first.pixels, second.pixels)
    assert torch.equal(first.labels, second.labels)


class Exploit:
    def __reduce__(self):
        return os.system, ("touch /nonexistent/pwned",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps({b"data": Exploit(), b"labels": []}, protocol=2), "only arrays are allowed"),
        (python2_batch()[:-900], "damaged or truncated"),
        (b"", "damaged or truncated"),
        (pickle.dumps({b"data": np.zeros((2, 7), np.uint8), b"labels": [1, 2]}, protocol=2), "expected n×3072"),
        (pickle.dumps([1, 2]), "not a CIFAR-10 batch"),
        (pickle.dumps({b"data": np.array([Exploit()], dtype=object), b"labels": [1]}), "only arrays are allowed"),
    ],
)
def test_bad_pickles_are_refused_and_never_run(tmp_path, content, message):
    (tmp_path / "data_batch_1").write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_cifar10(tmp_path)


def test_a_binary_batch_of_odd_length_is_refused(tmp_path):
    (tmp_path / "data_batch_1.bin").write_bytes(b"x" * 5000)
    with pytest.raises(DataError, match="whole number of records"):
        load_cifar10(tmp_path)


def test_image_folder_and_archive_agree(tmp_path):
    save_image(tmp_path / "photos/b/2.png", colour=(1, 2, 3))
    save_image(tmp_path / "photos/a/1.png")
    with tarfile.open(tmp_path / "photos.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "photos", "photos")
    folder, archived = (load_image_folder(tmp_path / n, size=16) for n in ("photos", "photos.tar.xz"))
    assert folder.classes == archived.classes == ("a", "b")
    assert folder.pixels.shape == (2, 3, 16, 16)
    assert torch.equal(folder.pixels, archived.pixels)
    assert folder.pixels[1, :, 0, 0].tolist() == [1, 2, 3]


def test_imagenet_preprocessing_is_the_papers(tmp_path):
    """Shorter side to 256, centre 224: a red frame of one eighth of the side disappears."""
    image = Image.new("RGB", (512, 1024), (255, 0, 0))
    image.paste((0, 255, 0), (32, 288, 480, 736))
    (tmp_path / "n01").mkdir()
    image.save(tmp_path / "n01/x.png")
    pixels = load_imagenet(tmp_path).pixels[0]
    assert pixels.shape == (3, 224, 224)
    assert pixels[:, 112, 112].tolist() == [0, 255, 0]
    assert pixels[0].float().mean() < 3
    done = Image.effect_noise((224, 224), 50).convert("RGB")
    (tmp_path / "done").mkdir()
    done.save(tmp_path / "done/y.png")
    again = load_imagenet(tmp_path / "done").pixels[0]
    assert torch.equal(again, torch.from_numpy(np.asarray(done).transpose(2, 0, 1).copy()))


def test_bad_images_are_named_or_counted(tmp_path):
    save_image(tmp_path / "a/good.png")
    (tmp_path / "a/fake.jpg").write_text("not an image")
    with pytest.raises(DataError, match=r"fake\.jpg: not a readable image"):
        load_image_folder(tmp_path)
    assert len(load_image_folder(tmp_path, skip_bad=True)) == 1
    truncated = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(truncated, "PNG")
    (tmp_path / "a/cut.png").write_bytes(truncated.getvalue()[:900])
    (tmp_path / "a/fake.jpg").unlink()
    with pytest.raises(DataError, match=r"cut\.png"):
        load_image_folder(tmp_path)


def test_places_without_data_say_so(tmp_path):
    save_image(tmp_path / "two/1.png", (8, 8))
    save_image(tmp_path / "two/2.png", (9, 9))
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.tar.gz").write_bytes(b"\x1f\x8b\x08 nothing")
    for call, message in [
        (lambda: load_image_folder(tmp_path / "nowhere"), "no such file or folder"),
        (lambda: load_image_folder(tmp_path / "empty"), "no readable image"),
        (lambda: load_image_folder(tmp_path / "two"), "different sizes"),
        (lambda: load_image_folder(tmp_path / "broken.tar.gz"), "archive cannot be read"),
        (lambda: load_image_folder(tmp_path / "two/1.png"), "neither a folder nor an archive"),
        (lambda: load_cifar10(tmp_path / "empty"), "no CIFAR-10 batches"),
        (lambda: load_imdb(tmp_path / "empty"), "no reviews here"),
        (lambda: load_text(tmp_path / "empty"), "no .txt files"),
        (lambda: load_text(tmp_path / "nothing.csv"), "cannot be read"),
        (lambda: open_images("nowhere", size=8, count=1, seed=0), "does not exist"),
    ]:
        with pytest.raises(DataError, match=message):
            call()


def test_texts_from_folders_and_tables(tmp_path):
    (tmp_path / "aclImdb/train/pos").mkdir(parents=True)
    (tmp_path / "aclImdb/train/neg").mkdir()
    (tmp_path / "aclImdb/train/pos/1_9.txt").write_text("a fine film")
    (tmp_path / "aclImdb/train/neg/0_2.txt").write_text("a poor film")
    (tmp_path / "table.csv").write_text("text,label\na fine film,pos\na poor film,neg\n")
    corpus = load_imdb(tmp_path / "aclImdb")
    assert (corpus.texts, corpus.labels) == (("a poor film", "a fine film"), (0, 1))
    assert load_text(tmp_path / "aclImdb").texts == corpus.texts
    assert load_text(tmp_path / "table.csv").labels == (1, 0)
    (tmp_path / "aclImdb/train/neg/3_1.txt").write_bytes("caf\xe9".encode("latin-1"))
    with pytest.raises(DataError, match=r"3_1\.txt: not UTF-8 text"):
        load_imdb(tmp_path / "aclImdb")
    (tmp_path / "bad.csv").write_text("words\nx\n")
    with pytest.raises(DataError, match="no column 'text'"):
        load_text(tmp_path / "bad.csv")


def test_results_are_written_whole_or_not_at_all(tmp_path):
    write_atomically(tmp_path / "new/x.json", "1")
    assert (tmp_path / "new/x.json").read_text() == "1"
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        write_atomically(tmp_path / "file/x.json", "1")
    with pytest.raises(ValueError, match="JSON"):
        to_json({"x": float("nan")})
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["x.json"]


def test_data_sets_of_the_hub_library(tmp_path):
    datasets = pytest.importorskip("datasets", reason="the hf extra is not installed")
    from qbi.data.hub import load_hub_images

    pictures = [Image.effect_noise((30, 20), 60).convert("RGB") for _ in range(4)]
    table = datasets.Dataset.from_dict({"picture": pictures, "label": [0, 1, 1, 0]})
    table.save_to_disk(str(tmp_path / "images"))
    images = load_hub_images(str(tmp_path / "images"), size=16, limit=3)
    assert images.pixels.shape == (3, 3, 16, 16)
    assert images.labels.tolist() == [0, 1, 1]
    texts = datasets.Dataset.from_dict({"review": ["good", "bad"]})
    texts.save_to_disk(str(tmp_path / "texts"))
    with pytest.raises(DataError, match="no image column"):
        load_hub_images(str(tmp_path / "texts"), size=16, limit=3)
    assert len(open_images(f"hf:{tmp_path / 'images'}", size=8, count=1, seed=0)) == 4
    (tmp_path / "broken").mkdir()
    with pytest.raises(DataError, match="cannot be loaded"):
        load_hub_images(str(tmp_path / "broken"), size=8, limit=1)
