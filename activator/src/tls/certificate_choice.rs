//! Pure: choice of the certificate for a handshake, among those of the host's own rules and those that hosts share.

use std::sync::Arc;

use common::certificates::CertificateNames;

/// Certificate with the hosts that it is for.
pub trait NamedCertificate {
    /// Hosts that the certificate is for.
    fn names(&self) -> &CertificateNames;
}

impl<C: NamedCertificate> NamedCertificate for Arc<C> {
    fn names(&self) -> &CertificateNames {
        (**self).names()
    }
}

/// Certificates in force that one handshake may present.
#[derive(Clone, Debug)]
pub struct CertificateCandidates<'a, C> {
    /// Certificates that the rules of the host name, in their order: of its DomainMapping, or of its listener.
    pub own: Vec<&'a C>,
    /// Shared certificates. Each is for the hosts that it names, and the first one is also the default.
    pub shared: &'a [C],
    /// True if no client gets the default certificate.
    pub is_sni_strict: bool,
}

impl<'a, C: NamedCertificate> CertificateCandidates<'a, C> {
    /// Chooses the certificate for a client that asks for `host`, in lower case and without final dot; `None`: the
    /// client names no host. The result is `None` without any certificate for the client.
    ///
    /// A host's own certificates go before shared ones, whatever names they have. Among several own ones, and among
    /// shared ones, an exact name goes before a wildcard. All other clients get the default, or none with strict SNI.
    ///
    /// `is_usable` returns true for certificates whose keys the client accepts. One that it does not accept gives way
    /// to the next one for the host. Without a usable one, the first one is chosen, and the handshake fails: a
    /// certificate of other hosts would be a wrong answer.
    pub fn choose(self, host: Option<&str>, is_usable: impl Fn(&C) -> bool) -> Option<&'a C> {
        let Self { own: mut candidates, shared, is_sni_strict } = self;
        if let Some(host) = host {
            let is_named = |it: &C| it.names().has_exact(host) || it.names().has_wildcard_for(host);
            // A listener has certificates for several hosts. One of another host must not take the place of those that
            // the client cannot use.
            if candidates.iter().any(|it| is_named(it)) {
                candidates.retain(|it| is_named(it));
            }
            // The sort keeps the order of certificates that name the host in the same way.
            candidates.sort_by_key(|it| {
                let names = it.names();
                (!names.has_exact(host), !names.has_wildcard_for(host))
            });
            candidates.extend(shared.iter().filter(|it| it.names().has_exact(host)));
            candidates.extend(shared.iter().filter(|it| it.names().has_wildcard_for(host)));
        }
        if candidates.is_empty() && !is_sni_strict {
            candidates.extend(shared);
        }
        let first = candidates.first().copied();
        candidates.into_iter().find(|it| is_usable(it)).or(first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct LabelledCertificate {
        label: &'static str,
        names: CertificateNames,
    }

    impl NamedCertificate for LabelledCertificate {
        fn names(&self) -> &CertificateNames {
            &self.names
        }
    }

    fn certificate(label: &'static str, names: &[&str]) -> LabelledCertificate {
        let names = CertificateNames::new(names.iter().map(|&it| it.to_owned()));
        LabelledCertificate { label, names }
    }

    /// Label of the certificate for a client that accepts the keys of these certificates.
    fn choose(
        own: &[LabelledCertificate],
        shared: &[LabelledCertificate],
        host: Option<&str>,
        is_usable: impl Fn(&str) -> bool,
    ) -> Option<&'static str> {
        let own = own.iter().collect();
        let candidates = CertificateCandidates { own, shared, is_sni_strict: false };
        candidates.choose(host, |it| is_usable(it.label)).map(|it| it.label)
    }

    #[test]
    fn exact_goes_before_wildcard_and_that_before_the_default() {
        let all = [
            certificate("default", &["other.example"]),
            certificate("wildcard", &["*.b.example"]),
            certificate("exact", &["a.b.example", "c.example"]),
            certificate("late", &["a.b.example", "*.b.example"]),
        ];
        let chosen = |host| choose(&[], &all, Some(host), |_| true);
        assert_eq!(chosen("a.b.example"), Some("exact"), "also if a wildcard comes first");
        assert_eq!(chosen("c.example"), Some("exact"));
        assert_eq!(chosen("x.b.example"), Some("wildcard"));
        assert_eq!(chosen("other.example"), Some("default"));
        assert_eq!(chosen("y.x.b.example"), Some("default"), "a wildcard is for one label");
        assert_eq!(chosen("b.example"), Some("default"));
    }

    #[test]
    fn the_certificate_of_a_mapping_goes_before_shared_ones() {
        let (own, all) = ([certificate("own", &[])], [certificate("exact", &["a.example"])]);
        assert_eq!(choose(&own, &all, Some("a.example"), |_| true), Some("own"));
        assert_eq!(choose(&[], &all, Some("a.example"), |_| true), Some("exact"));
        assert_eq!(choose(&own, &[], Some("a.example"), |_| true), Some("own"));
    }

    #[test]
    fn of_several_own_certificates_the_one_with_the_name_is_chosen() {
        let own = [
            certificate("other", &["b.example"]),
            certificate("wildcard", &["*.example"]),
            certificate("exact", &["a.example"]),
        ];
        let chosen = |host| choose(&own, &[], Some(host), |_| true);
        assert_eq!(chosen("a.example"), Some("exact"));
        assert_eq!(chosen("b.example"), Some("other"));
        assert_eq!(chosen("c.example"), Some("wildcard"));
        assert_eq!(chosen("c.b.example"), Some("other"), "the first one for all other names");
    }

    /// The two certificates of a listener are for one host each, and have keys of two kinds.
    #[test]
    fn a_client_that_cannot_use_the_certificate_of_its_host_gets_none_of_another_host() {
        let own = [certificate("rsa-a", &["a.example"]), certificate("ecdsa-b", &["b.example"])];
        let is_rsa = |label: &str| label.starts_with("rsa");
        let chosen = |host| choose(&own, &[], Some(host), is_rsa);
        assert_eq!(chosen("a.example"), Some("rsa-a"));
        assert_eq!(chosen("b.example"), Some("ecdsa-b"), "the handshake fails");
        assert_eq!(chosen("c.example"), Some("rsa-a"), "of those for all other names");
        let shared = [certificate("rsa-b", &["b.example"])];
        assert_eq!(choose(&own, &shared, Some("b.example"), is_rsa), Some("rsa-b"));
    }

    #[test]
    fn a_name_without_certificate_gets_the_first() {
        let all = [certificate("first", &[]), certificate("second", &["b.example"])];
        assert_eq!(choose(&[], &all, Some("a.example"), |_| true), Some("first"));
        assert_eq!(choose(&[], &all, None, |_| true), Some("first"), "no host is named");
        assert_eq!(choose(&[], &[], Some("a.example"), |_| true), None);
        assert_eq!(choose(&[], &[], None, |_| true), None);
    }

    #[test]
    fn with_strict_sni_no_client_gets_the_default() {
        let (own, shared) = (certificate("own", &[]), [certificate("first", &["a.example"])]);
        let chosen = |own: Vec<_>, host| {
            let candidates = CertificateCandidates { own, shared: &shared, is_sni_strict: true };
            candidates.choose(host, |_| true).map(|it| it.label)
        };
        assert_eq!(chosen(vec![], Some("a.example")), Some("first"));
        assert_eq!(chosen(vec![], Some("b.example")), None);
        assert_eq!(chosen(vec![], None), None, "no host is named");
        assert_eq!(chosen(vec![&own], Some("b.example")), Some("own"), "whatever its names");
    }

    #[test]
    fn a_client_of_one_kind_of_key_gets_the_certificate_with_that_key() {
        let own = [certificate("own-ecdsa", &["a.example"])];
        let shared = [
            certificate("default", &["b.example"]),
            certificate("ecdsa", &["a.example"]),
            certificate("rsa-wildcard", &["*.example"]),
            certificate("rsa", &["a.example"]),
        ];
        let is_rsa = |label: &str| label.starts_with("rsa");
        let chosen = |host: &str| choose(&own, &shared, Some(host), is_rsa);
        assert_eq!(chosen("a.example"), Some("rsa"));
        assert_eq!(choose(&own, &shared[..3], Some("a.example"), is_rsa), Some("rsa-wildcard"));
        assert_eq!(choose(&own, &shared[..2], Some("a.example"), is_rsa), Some("own-ecdsa"));
        // A certificate for other hosts does not take the place of one that the client cannot use.
        assert_eq!(choose(&[], &shared[1..2], Some("a.example"), |_| false), Some("ecdsa"));
        assert_eq!(choose(&[], &shared, None, is_rsa), Some("rsa-wildcard"), "of the default ones");
    }
}
