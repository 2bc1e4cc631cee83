//! Pure: certificates in force at one moment, without their keys, and the choice among them with its reason.

use std::collections::BTreeMap;

use common::{
    certificates::{CertificateFacts, CertificateNames},
    wire::NamespacedName,
};
use k8s_openapi::jiff::Timestamp;

use super::certificate_choice::{CertificateCandidates, NamedCertificate};
use crate::route_facts::{CertificateChoiceFacts, CertificateRule, HostCertificateFacts};

/// Most DNS names of one certificate that a page shows.
const MAX_SHOWN_NAMES: usize = 20;

/// Certificate in force without its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PresentedCertificate {
    /// Secret as `namespace/name`, or path of the file.
    pub name: String,
    /// Names and validity of the certificate.
    pub facts: CertificateFacts,
}

/// Certificates in force at one moment.
#[derive(Clone, Debug, Default)]
pub struct CertificateSnapshot {
    by_secret: BTreeMap<NamespacedName, PresentedCertificate>,
    /// Certificates that serve all hosts, in the order of their choice.
    shared: Vec<PresentedCertificate>,
    /// True if no client gets the default certificate.
    is_sni_strict: bool,
}

impl CertificateSnapshot {
    /// Builds the snapshot from the certificates of Secrets, and from those that serve all hosts in their order.
    /// `is_sni_strict`: no client gets the default certificate.
    pub fn new(
        secrets: impl IntoIterator<Item = (NamespacedName, PresentedCertificate)>,
        shared: impl IntoIterator<Item = PresentedCertificate>,
        is_sni_strict: bool,
    ) -> Self {
        let by_secret = secrets.into_iter().collect();
        Self { by_secret, shared: shared.into_iter().collect(), is_sni_strict }
    }

    /// Returns the certificate for a client that asks for `host`, with the reason. `own` are the Secrets that the
    /// mapping of the host names. The choice is that of handshakes, for a client that accepts keys of each kind.
    pub fn choose(
        &self,
        own: &[NamespacedName],
        host: &str,
    ) -> Option<(&PresentedCertificate, CertificateRule)> {
        let own: Vec<_> = own.iter().filter_map(|name| self.by_secret.get(name)).collect();
        let has_own = !own.is_empty();
        let is_sni_strict = self.is_sni_strict;
        let candidates = CertificateCandidates { own, shared: &self.shared, is_sni_strict };
        let chosen = candidates.choose(Some(host), |_any_key| true)?;
        let names = &chosen.facts.names;
        let rule = if has_own {
            CertificateRule::Mapping
        } else if names.has_exact(host) {
            CertificateRule::ExactName
        } else if names.has_wildcard_for(host) {
            CertificateRule::Wildcard
        } else {
            CertificateRule::Default
        };
        Some((chosen, rule))
    }

    /// Returns the choice for a host as pages show it.
    pub fn choice_facts(
        &self,
        own: &[NamespacedName],
        host: &str,
    ) -> Option<CertificateChoiceFacts> {
        let (chosen, rule) = self.choose(own, host)?;
        Some(CertificateChoiceFacts { name: chosen.name.clone(), rule })
    }
}

impl NamedCertificate for PresentedCertificate {
    fn names(&self) -> &CertificateNames {
        &self.facts.names
    }
}

impl PresentedCertificate {
    /// Returns the certificate as pages show it.
    pub fn page_facts(&self) -> HostCertificateFacts {
        let CertificateFacts { names, validity } = &self.facts;
        let not_after = Timestamp::from_second(validity.not_after_s);
        HostCertificateFacts {
            name: self.name.clone(),
            hosts: names.iter().take(MAX_SHOWN_NAMES).map(str::to_owned).collect(),
            all_hosts: names.iter().len(),
            not_after_s: validity.not_after_s,
            not_after: not_after.map(|it| it.to_string()).unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use common::certificates::CertificateValidity;

    use super::*;

    fn certificate(name: &str, hosts: &[String]) -> PresentedCertificate {
        let names = CertificateNames::new(hosts.iter().cloned());
        let validity = CertificateValidity { not_before_s: 0, not_after_s: 1_000_000_000 };
        PresentedCertificate { name: name.to_owned(), facts: CertificateFacts { names, validity } }
    }

    #[test]
    fn a_choice_has_its_reason() {
        let own = NamespacedName::new("shop", "own");
        let hosts = |all: &[&str]| all.iter().map(ToString::to_string).collect::<Vec<_>>();
        let snapshot = CertificateSnapshot::new(
            [(own.clone(), certificate("shop/own", &hosts(&["other.example"])))],
            [
                certificate("first", &hosts(&["a.example"])),
                certificate("second", &hosts(&["*.b.example"])),
            ],
            false,
        );
        let absent = NamespacedName::new("shop", "absent");
        for (secrets, host, name, rule) in [
            (&[absent.clone(), own][..], "a.example", "shop/own", CertificateRule::Mapping),
            (&[absent][..], "a.example", "first", CertificateRule::ExactName),
            (&[][..], "x.b.example", "second", CertificateRule::Wildcard),
            (&[][..], "y.x.b.example", "first", CertificateRule::Default),
        ] {
            let expected = CertificateChoiceFacts { name: name.to_owned(), rule };
            assert_eq!(snapshot.choice_facts(secrets, host), Some(expected), "{host}");
        }
        assert_eq!(CertificateSnapshot::default().choice_facts(&[], "a.example"), None);
    }

    #[test]
    fn of_many_names_the_first_ones_are_shown() {
        let hosts: Vec<String> = (0..25).map(|it| format!("h{it}.example")).collect();
        let facts = certificate("many", &hosts).page_facts();
        assert_eq!((facts.hosts.len(), facts.all_hosts), (MAX_SHOWN_NAMES, 25));
        assert_eq!(facts.hosts[0], "h0.example");
        assert_eq!(facts.not_after, "2001-09-09T01:46:40Z");
    }
}
