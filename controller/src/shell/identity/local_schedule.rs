//! Pure: certificates for names inside the cluster that are to be signed now.

use std::collections::BTreeMap;

use common::wire::NamespacedName;

use super::rotation::LOCAL_CERTIFICATE_LIFETIME;

/// Certificate that was signed for a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SignedRecord {
    /// Number of the request that it was signed for.
    request: u64,
    /// Time of creation of the authority that signed it, in s since 1970.
    authority_made_s: u64,
    /// Time of the signature, in s since 1970.
    signed_s: u64,
}

/// Certificates that were signed, compared with those that are wanted.
#[derive(Clone, Debug, Default)]
pub struct LocalCertificateSchedule {
    signed: BTreeMap<NamespacedName, SignedRecord>,
}

impl LocalCertificateSchedule {
    /// Returns the services whose certificate is to be signed at `now_s` by the authority that was created at
    /// `authority_made_s`. `wanted` has the number of each request. Services that are not wanted are forgotten.
    pub fn take_due(
        &mut self,
        wanted: &BTreeMap<NamespacedName, u64>,
        authority_made_s: u64,
        now_s: u64,
    ) -> Vec<NamespacedName> {
        // A service that comes back has another request, and needs another certificate.
        self.signed.retain(|service, _| wanted.contains_key(service));
        let is_due = |(service, request): &(&NamespacedName, &u64)| {
            let signed = self.signed.get(*service);
            signed.is_none_or(|it| {
                it.request != **request
                    || it.authority_made_s != authority_made_s
                    || !is_fresh(it.signed_s, now_s)
            })
        };
        wanted.iter().filter(is_due).map(|(service, _)| service.clone()).collect()
    }

    /// Returns true if a certificate was signed for this request and has not expired at `now_s`.
    pub fn has_valid(&self, service: &NamespacedName, request: u64, now_s: u64) -> bool {
        let signed = self.signed.get(service).filter(|it| it.request == request);
        // After the clock was set back, its age is not known, and less than that of a later moment.
        signed.is_some_and(|it| {
            now_s.saturating_sub(it.signed_s) < LOCAL_CERTIFICATE_LIFETIME.as_secs()
        })
    }

    /// Records a certificate that was signed.
    pub fn record(
        &mut self,
        service: NamespacedName,
        request: u64,
        authority_made_s: u64,
        signed_s: u64,
    ) {
        self.signed.insert(service, SignedRecord { request, authority_made_s, signed_s });
    }
}

/// Returns true in the first half of a certificate's life. After the clock was set back, a certificate is not fresh:
/// clients may find that it is not valid yet.
fn is_fresh(signed_s: u64, now_s: u64) -> bool {
    let age = now_s.checked_sub(signed_s);
    age.is_some_and(|age| age < LOCAL_CERTIFICATE_LIFETIME.as_secs() / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HALF_S: u64 = LOCAL_CERTIFICATE_LIFETIME.as_secs() / 2;

    fn name(name: &str) -> NamespacedName {
        NamespacedName::new("default", name)
    }

    fn wanted(all: &[(&str, u64)]) -> BTreeMap<NamespacedName, u64> {
        all.iter().map(|&(service, request)| (name(service), request)).collect()
    }

    /// Returns the names of the services that are due, after their certificates were signed.
    fn sign_due(
        schedule: &mut LocalCertificateSchedule,
        all: &[(&str, u64)],
        authority_made_s: u64,
        now_s: u64,
    ) -> Vec<String> {
        let wanted = wanted(all);
        let due = schedule.take_due(&wanted, authority_made_s, now_s);
        for service in &due {
            schedule.record(service.clone(), wanted[service], authority_made_s, now_s);
        }
        due.into_iter().map(|it| it.name.to_string()).collect()
    }

    #[test]
    fn each_request_is_signed_once() {
        let mut schedule = LocalCertificateSchedule::default();
        assert_eq!(sign_due(&mut schedule, &[("a", 1), ("b", 2)], 5, 100), ["a", "b"]);
        assert_eq!(sign_due(&mut schedule, &[("a", 1), ("b", 2)], 5, 100), [""; 0]);
        // The signer has not seen the set without the service.
        assert_eq!(sign_due(&mut schedule, &[("a", 3), ("b", 2)], 5, 100), ["a"]);
    }

    #[test]
    fn a_certificate_that_was_not_signed_stays_due() {
        let mut schedule = LocalCertificateSchedule::default();
        let wanted = wanted(&[("a", 1)]);
        assert_eq!(schedule.take_due(&wanted, 5, 100), [name("a")]);
        assert_eq!(schedule.take_due(&wanted, 5, 100), [name("a")]);
    }

    #[test]
    fn a_service_that_leaves_is_forgotten() {
        let mut schedule = LocalCertificateSchedule::default();
        sign_due(&mut schedule, &[("a", 1)], 5, 100);
        assert_eq!(sign_due(&mut schedule, &[], 5, 100), [""; 0]);
        assert!(schedule.signed.is_empty());
    }

    #[test]
    fn a_certificate_is_valid_for_its_request_until_it_expires() {
        let mut schedule = LocalCertificateSchedule::default();
        sign_due(&mut schedule, &[("a", 1)], 5, 100);
        let is_valid =
            |service: &str, request, now_s| schedule.has_valid(&name(service), request, now_s);
        assert!(is_valid("a", 1, 100) && is_valid("a", 1, 99 + 2 * HALF_S));
        assert!(!is_valid("a", 1, 100 + 2 * HALF_S), "it has expired");
        assert!(!is_valid("a", 2, 100), "it is of an earlier request");
        assert!(!is_valid("b", 1, 100), "it was never signed");
    }

    #[test]
    fn age_a_new_authority_and_a_clock_that_was_set_back_are_reasons_to_sign_again() {
        let mut schedule = LocalCertificateSchedule::default();
        let all = &[("a", 1)];
        sign_due(&mut schedule, all, 5, 100);
        assert_eq!(sign_due(&mut schedule, all, 5, 100 + HALF_S - 1), [""; 0]);
        assert_eq!(sign_due(&mut schedule, all, 5, 100 + HALF_S), ["a"]);
        assert_eq!(sign_due(&mut schedule, all, 6, 100 + HALF_S), ["a"]);
        assert_eq!(sign_due(&mut schedule, all, 6, 100), ["a"]);
    }
}
