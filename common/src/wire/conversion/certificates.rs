//! Pure: conversion of certificates of hosts. Errors have numbers and names only, and no bytes of certificates or keys.

use super::*;

/// Parses the name of a Secret. Unlike that of a service, it has no port.
pub(super) fn parse_secret_name(field: &'static str, text: &str) -> WireResult<NamespacedName> {
    match text.split_once('/') {
        Some((namespace, name)) if is_dns_label(namespace) && is_secret_name(name) => {
            Ok(NamespacedName::new(namespace, name))
        }
        _ => Err(WireError::new(field, text, "must be namespace/name")),
    }
}

/// Parses the name of a certificate: that of a Secret, or of a service with its port of TLS.
pub(super) fn parse_certificate_name(
    field: &'static str,
    text: &str,
) -> WireResult<NamespacedName> {
    let is_local = |name: &NamespacedName| {
        name.split_port().is_some_and(|(_service, port)| port == LOCAL_TLS_PORT)
    };
    match text.parse::<NamespacedName>() {
        Ok(name) if is_local(&name) => Ok(name),
        // The labels of a Secret's name may be longer than those of other objects.
        Ok(_) | Err(_) => parse_secret_name(field, text),
    }
}

impl TryFrom<raw::Certificate> for CertificateEntry {
    type Error = WireError;
    fn try_from(message: raw::Certificate) -> WireResult<Self> {
        let raw::Certificate { name, chain, key } = message;
        if chain.is_empty() != key.is_empty() {
            let rule = "must be empty together with the key";
            return Err(WireError::new("certificate.chain", chain.len(), rule));
        }
        let name = parse_certificate_name("certificate.name", &name)?;
        let material = (!chain.is_empty())
            .then(|| Arc::new(CertificateMaterial { chain, key: PrivateKeyBytes::new(key) }));
        Ok(Self { name, material })
    }
}

impl From<CertificateEntry> for raw::Certificate {
    fn from(value: CertificateEntry) -> Self {
        let (chain, key) = match value.material {
            Some(material) => {
                let CertificateMaterial { chain, key } = Arc::unwrap_or_clone(material);
                (chain, key.as_der().to_vec())
            }
            None => (Vec::new(), Vec::new()),
        };
        Self { name: value.name.to_string(), chain, key }
    }
}
