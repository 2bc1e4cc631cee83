//! Pure: the time in which a certificate is valid, and the rule for its replacement.

/// Time in which a certificate is valid, in seconds since 1970. Both ends belong to it (RFC 5280).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CertificateValidity {
    /// First second in which the certificate is valid.
    pub not_before_s: i64,
    /// Last second in which the certificate is valid.
    pub not_after_s: i64,
}

/// Validity of a certificate at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValidityState {
    /// The certificate will be valid later.
    NotYetValid,
    /// Clients accept the certificate now.
    Valid,
    /// The certificate was valid before.
    Expired,
}

impl CertificateValidity {
    /// Returns the state at a moment, in seconds since 1970.
    pub fn state_at(self, now_s: i64) -> ValidityState {
        if now_s < self.not_before_s {
            ValidityState::NotYetValid
        } else if now_s <= self.not_after_s {
            ValidityState::Valid
        } else {
            ValidityState::Expired
        }
    }

    /// Returns the first second after `now_s` in which the state is another one; `None`: it does not change any more.
    pub fn next_change_after(self, now_s: i64) -> Option<i64> {
        match self.state_at(now_s) {
            ValidityState::NotYetValid => Some(self.not_before_s),
            // Only the second after the last one is beyond the validity.
            ValidityState::Valid => self.not_after_s.checked_add(1),
            ValidityState::Expired => None,
        }
    }
}

/// Returns true if `next` may take the place of `held`: it is valid, or `held` is not. So a certificate that works is
/// not replaced by one that every client refuses.
pub fn may_replace(held: CertificateValidity, next: CertificateValidity, now_s: i64) -> bool {
    let is_valid = |it: CertificateValidity| it.state_at(now_s) == ValidityState::Valid;
    is_valid(next) || !is_valid(held)
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALIDITY: CertificateValidity =
        CertificateValidity { not_before_s: 100, not_after_s: 200 };

    #[test]
    fn both_ends_are_valid() {
        let states = [99, 100, 200, 201].map(|now_s| VALIDITY.state_at(now_s));
        let expected = [
            ValidityState::NotYetValid,
            ValidityState::Valid,
            ValidityState::Valid,
            ValidityState::Expired,
        ];
        assert_eq!(states, expected);
    }

    #[test]
    fn the_state_is_another_one_at_its_next_change() {
        assert_eq!(VALIDITY.next_change_after(-5), Some(100));
        assert_eq!(VALIDITY.next_change_after(99), Some(100));
        assert_eq!(VALIDITY.next_change_after(100), Some(201));
        assert_eq!(VALIDITY.next_change_after(200), Some(201));
        assert_eq!(VALIDITY.next_change_after(201), None);
        for now_s in [-5, 99, 100, 200] {
            let next_s = VALIDITY.next_change_after(now_s).expect("a change");
            assert_ne!(VALIDITY.state_at(next_s), VALIDITY.state_at(now_s));
            assert_eq!(VALIDITY.state_at(next_s - 1), VALIDITY.state_at(now_s));
        }
        let endless = CertificateValidity { not_before_s: 0, not_after_s: i64::MAX };
        assert_eq!(endless.next_change_after(7), None);
    }

    #[test]
    fn an_expired_certificate_replaces_no_valid_one() {
        let now_s = 150;
        let of_state = |state| match state {
            ValidityState::NotYetValid => {
                CertificateValidity { not_before_s: 151, not_after_s: 300 }
            }
            ValidityState::Valid => VALIDITY,
            ValidityState::Expired => CertificateValidity { not_before_s: 0, not_after_s: 149 },
        };
        let all = [ValidityState::NotYetValid, ValidityState::Valid, ValidityState::Expired];
        for (held, expected) in [
            (ValidityState::NotYetValid, [true, true, true]),
            (ValidityState::Valid, [false, true, false]),
            (ValidityState::Expired, [true, true, true]),
        ] {
            assert_eq!(of_state(held).state_at(now_s), held);
            let may = all.map(|next| may_replace(of_state(held), of_state(next), now_s));
            assert_eq!(may, expected, "from {held:?} to each of {all:?}");
        }
    }
}
