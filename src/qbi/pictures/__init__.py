"""From what arrives at a layer to the picture: a decoder that is learned on other images, then a fit through the known layers."""

from qbi.pictures.cache import decoder_for
from qbi.pictures.decoder import Decoder, learn_decoder
from qbi.pictures.fitting import fit_pictures
from qbi.pictures.prefix import Prefix

__all__ = ["Decoder", "Prefix", "decoder_for", "fit_pictures", "learn_decoder"]
