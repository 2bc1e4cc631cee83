//! Pure: `config-certmanager`: who signs certificates of public names.
//!
//! Keys and defaults: knative/serving `pkg/reconciler/certificate/config/cert_manager.go` at 98e5ef9.

use serde::Deserialize;

use super::{ConfigMap, keys::Keys};

/// One issuer of cert-manager.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Issuer {
    /// `Issuer` or `ClusterIssuer`.
    pub kind: String,
    /// Its name.
    pub name: String,
    /// Its API group; empty: cert-manager's own.
    pub group: String,
}

impl Default for Issuer {
    fn default() -> Self {
        let (kind, name) = ("ClusterIssuer".into(), "knative-selfsigned-issuer".into());
        Self { kind, name, group: String::new() }
    }
}

/// `config-certmanager`, checked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CertManager {
    /// `issuerRef`: names from outside.
    pub external: Issuer,
    /// `clusterLocalIssuerRef`: names inside the cluster.
    pub cluster_local: Issuer,
    /// `systemInternalIssuerRef`. Accepted: the controller signs certificates of the parts itself.
    pub system_internal: Issuer,
}

impl ConfigMap for CertManager {
    const NAME: &'static str = "config-certmanager";

    fn read(keys: &mut Keys<'_>) -> Self {
        let mut it = Self::default();
        for (key, to) in [
            ("issuerRef", &mut it.external),
            ("clusterLocalIssuerRef", &mut it.cluster_local),
            ("systemInternalIssuerRef", &mut it.system_internal),
        ] {
            match keys.get(key).map(serde_norway::from_str::<Option<Issuer>>) {
                None | Some(Ok(None)) => {}
                Some(Ok(Some(issuer))) => *to = issuer,
                Some(Err(why)) => keys.wrong(format!("failed to parse {key:?}: {why}")),
            }
        }
        it
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config_maps::read;

    #[test]
    fn an_issuer_is_read_and_what_it_leaves_out_stays() {
        let text = "kind: Issuer\nname: letsencrypt\n".to_owned();
        let read = read::<CertManager>(&[("issuerRef".to_owned(), text)].into()).unwrap().value;
        let external =
            Issuer { kind: "Issuer".into(), name: "letsencrypt".into(), group: String::new() };
        assert_eq!(read, CertManager { external, ..CertManager::default() });
    }

    #[test]
    fn what_is_no_issuer_is_refused() {
        let data = [("issuerRef".to_owned(), "[]".to_owned())].into();
        assert!(read::<CertManager>(&data).is_err());
    }
}
