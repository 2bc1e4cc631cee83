//! Pure: choice among the certificates that hosts share.

use common::certificates::CertificateNames;

/// Certificate that serves each host of its names, and all hosts without a certificate if it is the first one.
#[derive(Clone, Debug)]
pub struct SharedCertificate<C> {
    /// Hosts that the certificate is for.
    pub names: CertificateNames,
    /// Settings or key of the certificate.
    pub value: C,
}

/// Chooses a certificate for a client: the one of the Secret that the mapping of its host names goes first, if it is in
/// force. Otherwise shared ones are chosen by [`choose_shared`].
pub fn choose_certificate<'a, C>(
    own: Option<&'a C>,
    shared: &'a [SharedCertificate<C>],
    host: Option<&str>,
) -> Option<&'a C> {
    own.or_else(|| choose_shared(shared, host))
}

/// Chooses a certificate for a client that asks for `host`, in lower case and without final dot.
///
/// An exact name goes before a wildcard, and a wildcard before the default, which is the first certificate. Of several
/// with a fitting name the first counts. Clients that name no host get the default. `None`: there is no certificate.
pub fn choose_shared<'a, C>(
    shared: &'a [SharedCertificate<C>],
    host: Option<&str>,
) -> Option<&'a C> {
    let named = host.and_then(|host| {
        let exact = shared.iter().find(|it| it.names.has_exact(host));
        exact.or_else(|| shared.iter().find(|it| it.names.has_wildcard_for(host)))
    });
    named.or_else(|| shared.first()).map(|it| &it.value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shared(value: &'static str, names: &[&str]) -> SharedCertificate<&'static str> {
        let names = CertificateNames::new(names.iter().map(|&it| it.to_owned()));
        SharedCertificate { names, value }
    }

    #[test]
    fn exact_goes_before_wildcard_and_that_before_the_default() {
        let all = [
            shared("default", &["other.example"]),
            shared("wildcard", &["*.b.example"]),
            shared("exact", &["a.b.example", "c.example"]),
            shared("late", &["a.b.example", "*.b.example"]),
        ];
        let chosen = |host| choose_shared(&all, Some(host)).copied();
        assert_eq!(chosen("a.b.example"), Some("exact"), "also if a wildcard comes first");
        assert_eq!(chosen("c.example"), Some("exact"));
        assert_eq!(chosen("x.b.example"), Some("wildcard"));
        assert_eq!(chosen("other.example"), Some("default"));
        assert_eq!(chosen("y.x.b.example"), Some("default"), "a wildcard is for one label");
        assert_eq!(chosen("b.example"), Some("default"));
    }

    #[test]
    fn the_certificate_of_a_mapping_goes_before_shared_ones() {
        let all = [shared("exact", &["a.example"])];
        assert_eq!(choose_certificate(Some(&"own"), &all, Some("a.example")), Some(&"own"));
        assert_eq!(choose_certificate(None, &all, Some("a.example")), Some(&"exact"));
        assert_eq!(choose_certificate(Some(&"own"), &[], None), Some(&"own"));
    }

    #[test]
    fn a_name_without_certificate_gets_the_first() {
        let all = [shared("first", &[]), shared("second", &["b.example"])];
        assert_eq!(choose_shared(&all, Some("a.example")), Some(&"first"));
        assert_eq!(choose_shared(&all, None), Some(&"first"), "no host is named");
        assert_eq!(choose_shared::<u8>(&[], Some("a.example")), None);
        assert_eq!(choose_shared::<u8>(&[], None), None);
    }
}
