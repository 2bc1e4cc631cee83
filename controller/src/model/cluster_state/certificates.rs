//! Pure: certificates of hosts by the Secrets that hold them, and the rules for a certificate that replaces another.

use std::{collections::BTreeMap, sync::Arc};

use common::{
    certificates::{CertificateFacts, ValidityState, may_replace},
    wire::{CertificateMaterial, NamespacedName},
};

use super::values::rfc3339_of_seconds;

/// Certificates of the Secrets that DomainMappings and `config-network` name.
#[derive(Clone, Debug, Default)]
pub struct ObservedCertificates {
    /// State of each named Secret, also of one that was not read yet.
    pub by_secret: BTreeMap<NamespacedName, CertificateState>,
}

/// State of one named Secret.
#[derive(Clone, Debug, PartialEq)]
pub struct CertificateState {
    /// Certificate that activators have. Only a usable one replaces it.
    pub in_force: Option<CertificateInForce>,
    /// Result of the last read of the Secret.
    pub last_read: SecretReadState,
    /// Certificate of the last read that must not replace a valid one now. It may once time has passed.
    pub postponed: Option<CertificateInForce>,
}

/// A certificate with its key, and the facts that decisions depend on.
#[derive(Clone, Debug, PartialEq)]
pub struct CertificateInForce {
    /// Chain and key, as activators get them.
    pub material: Arc<CertificateMaterial>,
    /// Hosts and validity of the certificate.
    pub facts: CertificateFacts,
}

/// Result of the last read of a Secret, as its condition shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SecretReadState {
    /// The Secret was not read yet.
    Pending,
    /// The certificate of the Secret is in force.
    InForce,
    /// The Secret does not exist.
    Absent,
    /// The content of the Secret cannot be used, for this reason.
    Refused(String),
    /// The API server has returned this error, and no result before.
    Unreadable(String),
}

/// Result of one read of a named Secret.
#[derive(Clone, Debug, PartialEq)]
pub enum SecretRead {
    /// The Secret holds a certificate and its key, which are checked.
    Usable {
        /// Chain and key, as activators get them.
        material: Arc<CertificateMaterial>,
        /// Hosts and validity of the certificate.
        facts: CertificateFacts,
    },
    /// The Secret does not exist.
    Absent,
    /// The content of the Secret cannot be used, for this reason.
    Faulty(String),
    /// The API server has returned this error.
    Unreadable(String),
}

impl CertificateState {
    /// Returns the state of a Secret that was not read yet.
    pub fn pending() -> Self {
        Self { in_force: None, last_read: SecretReadState::Pending, postponed: None }
    }

    /// Applies the result of a read. `now_s` is in seconds since 1970.
    pub fn apply_read(&mut self, read: SecretRead, now_s: i64) {
        match read {
            SecretRead::Usable { material, facts } => {
                self.offer(CertificateInForce { material, facts }, now_s);
            }
            SecretRead::Absent => self.refuse(SecretReadState::Absent),
            SecretRead::Faulty(fault) => self.refuse(SecretReadState::Refused(fault)),
            // An error says nothing about the Secret, so an earlier result stays.
            SecretRead::Unreadable(error) => {
                if matches!(
                    self.last_read,
                    SecretReadState::Pending | SecretReadState::Unreadable(_)
                ) {
                    self.last_read = SecretReadState::Unreadable(error);
                }
            }
        }
    }

    /// Puts the postponed certificate in force if it may replace the other one by now. The reader of Secrets reports
    /// an unchanged Secret once.
    pub fn retry_postponed(&mut self, now_s: i64) {
        if let Some(certificate) = self.postponed.take() {
            self.offer(certificate, now_s);
        }
    }

    /// Returns the next moment after `now_s` at which time alone may change the state or a condition that follows from
    /// it. Both are in seconds since 1970.
    pub fn next_change_after(&self, now_s: i64) -> Option<i64> {
        let all = self.in_force.iter().chain(&self.postponed);
        all.filter_map(|it| it.facts.validity.next_change_after(now_s)).min()
    }

    fn refuse(&mut self, last_read: SecretReadState) {
        self.last_read = last_read;
        self.postponed = None;
    }

    fn offer(&mut self, certificate: CertificateInForce, now_s: i64) {
        let next = certificate.facts.validity;
        let held = self.in_force.as_ref().map(|it| it.facts.validity);
        if held.is_none_or(|held| may_replace(held, next, now_s)) {
            self.in_force = Some(certificate);
            self.refuse(SecretReadState::InForce);
            return;
        }
        let fault = match next.state_at(now_s) {
            ValidityState::NotYetValid => {
                let begin = rfc3339_of_seconds(next.not_before_s);
                format!("its certificate is not valid before {begin}")
            }
            // A valid one replaces any other.
            ValidityState::Expired | ValidityState::Valid => {
                format!("its certificate has expired at {}", rfc3339_of_seconds(next.not_after_s))
            }
        };
        self.postponed = Some(certificate);
        self.last_read = SecretReadState::Refused(fault);
    }
}

#[cfg(test)]
mod tests {
    use common::{
        certificates::{CertificateNames, CertificateValidity},
        wire::PrivateKeyBytes,
    };

    use super::*;

    const NOW_S: i64 = 1000;
    const VALID: (i64, i64) = (0, 2000);
    const EXPIRED: (i64, i64) = (0, 900);
    const EARLY: (i64, i64) = (1500, 3000);

    /// Returns a certificate that differs from those with another serial.
    fn certificate(serial: u8, (not_before_s, not_after_s): (i64, i64)) -> CertificateInForce {
        let key = PrivateKeyBytes::new(vec![serial]);
        let names = CertificateNames::new(["a.test".to_owned()]);
        let validity = CertificateValidity { not_before_s, not_after_s };
        CertificateInForce {
            material: Arc::new(CertificateMaterial { chain: vec![vec![serial]], key }),
            facts: CertificateFacts { names, validity },
        }
    }

    fn usable(it: &CertificateInForce) -> SecretRead {
        SecretRead::Usable { material: Arc::clone(&it.material), facts: it.facts.clone() }
    }

    fn state_with(it: &CertificateInForce) -> CertificateState {
        let mut state = CertificateState::pending();
        state.apply_read(usable(it), NOW_S);
        state
    }

    #[test]
    fn nothing_but_a_usable_certificate_replaces_one() {
        let first = certificate(1, VALID);
        for (read, expected) in [
            (SecretRead::Absent, SecretReadState::Absent),
            (SecretRead::Faulty("fault".into()), SecretReadState::Refused("fault".into())),
            (SecretRead::Unreadable("error".into()), SecretReadState::InForce),
        ] {
            let mut state = state_with(&first);
            state.apply_read(read, NOW_S);
            assert_eq!((&state.in_force, &state.last_read), (&Some(first.clone()), &expected));
        }
        let (mut state, second) = (state_with(&first), certificate(2, VALID));
        state.apply_read(usable(&second), NOW_S);
        assert_eq!(state, state_with(&second));
    }

    #[test]
    fn the_first_certificate_is_in_force_whatever_its_validity() {
        for validity in [VALID, EXPIRED, EARLY] {
            let first = certificate(1, validity);
            assert_eq!(state_with(&first).in_force, Some(first));
        }
    }

    #[test]
    fn a_certificate_that_is_not_valid_replaces_a_valid_one_only_after_its_end() {
        let (first, second) = (certificate(1, VALID), certificate(2, EXPIRED));
        let mut state = state_with(&first);
        state.apply_read(usable(&second), NOW_S);
        let fault = "its certificate has expired at 1970-01-01T00:15:00Z";
        assert_eq!(state.last_read, SecretReadState::Refused(fault.into()));
        assert_eq!(state.in_force, Some(first));
        state.retry_postponed(2000);
        assert_eq!(state.last_read, SecretReadState::Refused(fault.into()), "the last second");
        state.retry_postponed(2001);
        assert_eq!(state, state_with(&second));
    }

    #[test]
    fn a_certificate_that_comes_early_waits_for_its_time() {
        let (first, second) = (certificate(1, VALID), certificate(2, EARLY));
        let mut state = state_with(&first);
        state.apply_read(usable(&second), NOW_S);
        let fault = "its certificate is not valid before 1970-01-01T00:25:00Z";
        assert_eq!(state.last_read, SecretReadState::Refused(fault.into()));
        assert_eq!(state.next_change_after(NOW_S), Some(1500));
        state.retry_postponed(1500);
        assert_eq!(state, state_with(&second));
    }

    #[test]
    fn a_postponed_certificate_is_forgotten_with_its_secret() {
        let first = certificate(1, VALID);
        let mut state = state_with(&first);
        state.apply_read(usable(&certificate(2, EARLY)), NOW_S);
        state.apply_read(SecretRead::Absent, NOW_S);
        state.retry_postponed(1500);
        assert_eq!((state.in_force, state.last_read), (Some(first), SecretReadState::Absent));
    }

    #[test]
    fn an_error_replaces_an_error_and_no_result() {
        let mut state = CertificateState::pending();
        for error in ["one", "two"] {
            state.apply_read(SecretRead::Unreadable(error.into()), NOW_S);
            assert_eq!(state.last_read, SecretReadState::Unreadable(error.into()));
        }
        state.apply_read(SecretRead::Absent, NOW_S);
        state.apply_read(SecretRead::Unreadable("three".into()), NOW_S);
        assert_eq!(state.last_read, SecretReadState::Absent);
    }
}
