//! Pure: authorities whose client certificates hosts accept: PEM, checks, and trust anchors for handshakes.

use rustls::{
    RootCertStore,
    pki_types::{
        CertificateDer,
        pem::{PemObject as _, SectionKind},
    },
};
use x509_parser::parse_x509_certificate;

use super::PemSection;
use crate::wire::ClientCaMaterial;

/// Maximum size of all authorities, in bytes.
pub const MAX_CLIENT_CA_BYTES: usize = 64 << 10;
/// Maximum number of authorities. Each client is told their names.
pub const MAX_CLIENT_CA_COUNT: usize = 64;

/// Reason for which authorities cannot be used. The texts call the file as the key of a Secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClientCaFault {
    /// The authorities exceed their maximum size or number.
    #[error("ca.crt has more than 64 KiB or 64 certificates")]
    TooLarge,
    /// There is no authority.
    #[error("ca.crt holds no certificate in PEM")]
    NoCertificate,
    /// The certificate at this place, counted from 1, is malformed.
    #[error("certificate {0} of ca.crt cannot be read")]
    MalformedCertificate(usize),
    /// The certificate at this place, counted from 1, may issue no others.
    #[error("certificate {0} of ca.crt is not that of a certificate authority")]
    NotAnAuthority(usize),
}

/// Parses authorities from PEM, and checks them as [`load_client_ca`] does. Other sections are ignored.
pub fn parse_client_ca(pem: &[u8]) -> Result<ClientCaMaterial, ClientCaFault> {
    if pem.len() > MAX_CLIENT_CA_BYTES {
        return Err(ClientCaFault::TooLarge);
    }
    let mut certificates = Vec::new();
    for section in PemSection::pem_slice_iter(pem) {
        match section {
            Ok((SectionKind::Certificate, der)) => certificates.push(der),
            Ok(_) => {}
            Err(_) => return Err(ClientCaFault::MalformedCertificate(certificates.len() + 1)),
        }
    }
    let material = ClientCaMaterial(certificates);
    load_client_ca(&material)?;
    Ok(material)
}

/// Returns the trust anchors of authorities. All of them must be usable: without one, some clients would be refused.
/// Validity is not checked, since a trust anchor has none (RFC 5280, section 6.1.1).
pub fn load_client_ca(material: &ClientCaMaterial) -> Result<RootCertStore, ClientCaFault> {
    let ClientCaMaterial(certificates) = material;
    let bytes: usize = certificates.iter().map(Vec::len).sum();
    if certificates.is_empty() {
        return Err(ClientCaFault::NoCertificate);
    }
    if bytes > MAX_CLIENT_CA_BYTES || certificates.len() > MAX_CLIENT_CA_COUNT {
        return Err(ClientCaFault::TooLarge);
    }
    let mut roots = RootCertStore::empty();
    for (index, der) in certificates.iter().enumerate() {
        let malformed = ClientCaFault::MalformedCertificate(index + 1);
        let Ok(([], certificate)) = parse_x509_certificate(der) else { return Err(malformed) };
        // A certificate of a client would be trusted as its own authority.
        if !certificate.is_ca() {
            return Err(ClientCaFault::NotAnAuthority(index + 1));
        }
        let added = roots.add(CertificateDer::from(der.as_slice()));
        added.map_err(|_refused| malformed)?;
    }
    Ok(roots)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::certificates::TestAuthority;

    #[test]
    fn authorities_are_read_in_their_order() {
        let [one, other] = [TestAuthority::new(), TestAuthority::new()];
        let key = one.issue_client("a client").key_pem;
        let pem = format!("text\n{}{key}{}", one.certificate_pem(), other.certificate_pem());
        let material = parse_client_ca(pem.as_bytes()).expect("two authorities");
        let expected = [one, other].map(|it| it.client_ca().0.remove(0));
        assert_eq!(material.0, expected, "and the private key is left out");
        assert_eq!(load_client_ca(&material).map(|it| it.len()), Ok(2));
    }

    #[test]
    fn what_is_no_authority_is_refused_with_its_place() {
        let authority = TestAuthority::new();
        let refusal = |pem: &str| {
            parse_client_ca(pem.as_bytes()).map_err(|fault| fault.to_string()).expect_err("refused")
        };
        assert_eq!(refusal(""), "ca.crt holds no certificate in PEM");
        let leaf = authority.issue_client("a client").chain_pem;
        assert_eq!(
            refusal(&(authority.certificate_pem() + &leaf)),
            "certificate 2 of ca.crt is not that of a certificate authority"
        );
        let broken = "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n";
        assert_eq!(refusal(broken), "certificate 1 of ca.crt cannot be read");
        let many = authority.certificate_pem().repeat(MAX_CLIENT_CA_COUNT + 1);
        let large = "ca.crt has more than 64 KiB or 64 certificates";
        assert_eq!(refusal(&many), large);
        assert_eq!(refusal(&" ".repeat(MAX_CLIENT_CA_BYTES + 1)), large);
    }
}
