//! Pure: `config-certmanager`: who would sign certificates of public names. Nothing asks for any: services are served
//! without TLS, and the controller itself signs certificates of the parts.
//!
//! Keys: knative/serving `pkg/reconciler/certificate/config/cert_manager.go` at 98e5ef9.

use std::collections::BTreeMap;

use serde::de::IgnoredAny;

use super::{ConfigMap, keys::Keys, network::NO_TLS};

/// `config-certmanager`: nothing in it counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CertManager;

/// What Knative reads as an issuer.
type Issuer = Option<BTreeMap<String, IgnoredAny>>;

impl ConfigMap for CertManager {
    const NAME: &'static str = "config-certmanager";

    fn read(keys: &mut Keys<'_>) -> Self {
        for key in ["issuerRef", "clusterLocalIssuerRef", "systemInternalIssuerRef"] {
            if let Some(Err(why)) = keys.get(key).map(serde_norway::from_str::<Issuer>) {
                keys.wrong(format!("failed to parse {key:?}: {why}"));
            }
            keys.idle(key, &[], NO_TLS);
        }
        Self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config_maps::read;

    fn issuer(text: &str) -> BTreeMap<String, String> {
        [("issuerRef".to_owned(), text.to_owned())].into()
    }

    #[test]
    fn an_issuer_is_accepted_and_told() {
        let read = read::<CertManager>(&issuer("kind: Issuer\nname: letsencrypt\n")).unwrap();
        let want = "key \"issuerRef\" has no effect: services are served without TLS";
        assert_eq!(read.warnings, [want]);
    }

    #[test]
    fn what_is_no_issuer_is_refused() {
        assert!(read::<CertManager>(&issuer("[]")).is_err());
    }
}
