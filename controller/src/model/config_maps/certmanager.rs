//! Pure: `config-certmanager`: issuer of the certificates that are requested for public names. The controller itself
//! signs those of the components.
//!
//! Keys: knative/serving `pkg/reconciler/certificate/config/cert_manager.go` at 98e5ef9.

use std::collections::BTreeMap;

use serde::{Deserialize, de::IgnoredAny};

use super::{ConfigMapSettings, keys::ConfigMapReader};

/// Reason for which issuers of certificates inside the cluster have no effect.
const OWN_AUTHORITY: &str =
    "the controller itself signs certificates inside the cluster, for names and for components";

/// `config-certmanager`, checked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CertManagerConfig {
    /// `issuerRef`: issuer of certificates for public names; `None`: none can be requested. Default none.
    pub issuer: Option<CertManagerIssuer>,
}

/// Reference to an issuer of cert-manager. An empty field is left out of the certificate, and cert-manager has a default
/// for it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct CertManagerIssuer {
    /// Name of the issuer.
    pub name: String,
    /// Kind of the issuer, such as `ClusterIssuer`.
    pub kind: String,
    /// API group of the issuer; empty: that of cert-manager.
    pub group: String,
}

/// An issuer that nothing reads: any YAML mapping, or nothing.
type UnusedIssuer = Option<BTreeMap<String, IgnoredAny>>;

impl ConfigMapSettings for CertManagerConfig {
    const NAME: &'static str = "config-certmanager";

    fn read(keys: &mut ConfigMapReader<'_>) -> Self {
        for key in ["clusterLocalIssuerRef", "systemInternalIssuerRef"] {
            // Knative refuses what is no mapping, so it is refused here, although nothing reads the issuer.
            if let Some(Err(error)) = keys.get(key).map(serde_norway::from_str::<UnusedIssuer>) {
                keys.add_error(format!("failed to parse {key:?}: {error}"));
            }
            keys.warn_unless_usual(key, &[], OWN_AUTHORITY);
        }
        Self { issuer: read_issuer(keys) }
    }
}

/// Reads the issuer of certificates for public names. Knative accepts one without a name, and requests then fail.
fn read_issuer(keys: &mut ConfigMapReader<'_>) -> Option<CertManagerIssuer> {
    let key = "issuerRef";
    let text = keys.get(key)?;
    match serde_norway::from_str::<Option<CertManagerIssuer>>(text) {
        Ok(issuer) => {
            if issuer.as_ref().is_some_and(|it| it.name.is_empty()) {
                keys.add_error(format!("{key} has no name: name an issuer of cert-manager"));
            }
            issuer
        }
        Err(error) => {
            keys.add_error(format!("failed to parse {key:?}: {error}"));
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::config_maps::read;

    fn data(key: &str, text: &str) -> BTreeMap<String, String> {
        [(key.to_owned(), text.to_owned())].into()
    }

    #[test]
    fn the_issuer_of_public_names_is_read() {
        let text = "kind: ClusterIssuer\nname: letsencrypt\n";
        let read = read::<CertManagerConfig>(&data("issuerRef", text)).unwrap();
        let issuer = CertManagerIssuer {
            name: "letsencrypt".into(),
            kind: "ClusterIssuer".into(),
            group: String::new(),
        };
        assert_eq!(read.value, CertManagerConfig { issuer: Some(issuer) });
        assert_eq!(read.warnings, [""; 0]);
    }

    #[test]
    fn an_issuer_inside_the_cluster_is_accepted_with_a_warning() {
        let key = "clusterLocalIssuerRef";
        let read = read::<CertManagerConfig>(&data(key, "name: a\n")).unwrap();
        assert_eq!(read.warnings, [format!("key {key:?} has no effect: {OWN_AUTHORITY}")]);
        assert_eq!(read.value, CertManagerConfig::default());
    }

    #[test]
    fn an_invalid_issuer_is_refused() {
        for text in ["[]", "kind: ClusterIssuer\n"] {
            assert!(read::<CertManagerConfig>(&data("issuerRef", text)).is_err(), "{text}");
        }
        assert!(read::<CertManagerConfig>(&data("clusterLocalIssuerRef", "[]")).is_err());
    }
}
