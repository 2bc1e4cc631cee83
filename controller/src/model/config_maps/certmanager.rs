//! Pure: `config-certmanager`: issuers of certificates for public names. No such certificates are requested: users name
//! Secrets with theirs, and the controller itself signs those of the components.
//!
//! Keys: knative/serving `pkg/reconciler/certificate/config/cert_manager.go` at 98e5ef9.

use std::collections::BTreeMap;

use serde::de::IgnoredAny;

use super::{ConfigMapSettings, keys::ConfigMapReader, network::NO_TLS};

/// `config-certmanager`, in which no key has an effect.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CertManagerConfig;

/// An issuer as Knative reads it: any YAML mapping, or nothing.
type CertManagerIssuer = Option<BTreeMap<String, IgnoredAny>>;

impl ConfigMapSettings for CertManagerConfig {
    const NAME: &'static str = "config-certmanager";

    fn read(keys: &mut ConfigMapReader<'_>) -> Self {
        for key in ["issuerRef", "clusterLocalIssuerRef", "systemInternalIssuerRef"] {
            // Knative refuses what is no mapping, so it is refused here, although nothing reads the issuer.
            if let Some(Err(error)) = keys.get(key).map(serde_norway::from_str::<CertManagerIssuer>)
            {
                keys.add_error(format!("failed to parse {key:?}: {error}"));
            }
            keys.warn_unless_usual(key, &[], NO_TLS);
        }
        Self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::config_maps::read;

    fn issuer(text: &str) -> BTreeMap<String, String> {
        [("issuerRef".to_owned(), text.to_owned())].into()
    }

    #[test]
    fn an_issuer_is_accepted_with_a_warning() {
        let read = read::<CertManagerConfig>(&issuer("kind: Issuer\nname: letsencrypt\n")).unwrap();
        assert_eq!(read.warnings, [format!("key \"issuerRef\" has no effect: {NO_TLS}")]);
    }

    #[test]
    fn an_invalid_issuer_is_refused() {
        assert!(read::<CertManagerConfig>(&issuer("[]")).is_err());
    }
}
