"""A certificate for a federation on this machine: an authority of its own, forgotten when the federation ends."""

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

HERE = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]


def write_certificates(folder: Path) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """Options of the SuperLink, options of a SuperNode, and a line for the configuration of `flwr`."""
    authority, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    own = _signed("qbi test authority", authority, "qbi test authority", authority, is_authority=True)
    server = _signed("localhost", key, "qbi test authority", authority, is_authority=False)
    place = {name: folder / name for name in ("ca.crt", "server.pem", "server.key")}
    place["ca.crt"].write_bytes(own.public_bytes(Encoding.PEM))
    place["server.pem"].write_bytes(server.public_bytes(Encoding.PEM))
    place["server.key"].touch(mode=0o600)
    place["server.key"].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    options = ("--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key")
    servers = tuple(str(place.get(word, word)) for word in options)
    return servers, ("--root-certificates", str(place["ca.crt"])), f'root-certificates = "{place["ca.crt"]}"'


def _signed(
    name: str, key: ec.EllipticCurvePrivateKey, by: str, authority: ec.EllipticCurvePrivateKey, *, is_authority: bool
) -> x509.Certificate:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, by)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(HERE), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(authority, hashes.SHA256())
    )
