//! Pure: choice of the authority that signs, and the time of its replacement.
//!
//! A new authority is trusted by all components before it signs anything. The old one stays trusted until nothing that
//! it signed is in use: no component ever meets a certificate that it cannot check.
//!
//! ```text
//! old   signs ───────────────────────┤ trusted ──┤ gone
//! new                  made, trusted ┤ signs ────────────────…
//!                      └── OVERLAP ──┘
//!                                    └── OVERLAP ─┘
//! ```

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Lifetime of a component's certificate, which is replaced at about half of it.
pub const CERTIFICATE_LIFETIME: Duration = Duration::from_secs(3_600);
/// Lifetime of a certificate for names inside the cluster, which is replaced at about half of it.
pub const LOCAL_CERTIFICATE_LIFETIME: Duration = Duration::from_secs(30 * 86_400);

/// Times of the authorities of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RotationSchedule {
    /// Begin of the common names of the authorities.
    pub common_name: &'static str,
    /// Time for all to trust a new authority, and to replace what the old one signed, in s. It is longer than the
    /// lifetime of a certificate.
    pub overlap_s: u64,
    /// Lifetime of an authority in s.
    pub lifetime_s: u64,
    /// Age of an authority at which its successor is created, in s.
    pub rotation_age_s: u64,
}

/// Schedule of the authorities of components. In an overlap, every component renews its certificate at least twice.
pub const COMPONENT_SCHEDULE: RotationSchedule = RotationSchedule {
    common_name: "Rouse authority",
    overlap_s: 2 * 3_600,
    lifetime_s: 365 * 86_400,
    rotation_age_s: 240 * 86_400,
};

/// Schedule of the authorities of names inside the cluster. Users copy these to their clients, also by hand, so the
/// overlap is months.
pub const LOCAL_SCHEDULE: RotationSchedule = RotationSchedule {
    common_name: "Rouse cluster-local authority",
    overlap_s: 60 * 86_400,
    lifetime_s: 3 * 365 * 86_400,
    rotation_age_s: 365 * 86_400,
};

/// One authority, as stored in the Secret.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CertificateAuthority {
    /// Certificate of the authority, in PEM.
    pub certificate: String,
    /// Private key of the authority, in PEM. Known to controllers only.
    pub key: String,
    /// Time of creation, in s since 1970.
    pub made_s: u64,
    /// Time at which its certificate expires, in s since 1970.
    pub ends_s: u64,
}

impl std::fmt::Debug for CertificateAuthority {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The key is left out, since debug output may reach a log.
        let mut out = out.debug_struct("CertificateAuthority");
        out.field("made_s", &self.made_s).field("ends_s", &self.ends_s).finish_non_exhaustive()
    }
}

/// All authorities that are trusted, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CertificateAuthorities(Vec<CertificateAuthority>);

/// Action that is due on the authorities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RotationStep {
    /// No action is due.
    None,
    /// A new authority must be created.
    Create,
    /// The oldest authority must lose its trust.
    RemoveOldest,
}

impl CertificateAuthorities {
    /// All trusted authorities, the oldest first.
    pub fn all(&self) -> &[CertificateAuthority] {
        &self.0
    }

    /// The authority that signs at `now_s`: the newest that all have had time to trust.
    pub fn signing_authority(
        &self,
        schedule: &RotationSchedule,
        now_s: u64,
    ) -> Option<&CertificateAuthority> {
        let valid = || self.0.iter().filter(|it| now_s < it.ends_s);
        let distributed = valid().rfind(|it| it.made_s.saturating_add(schedule.overlap_s) <= now_s);
        // At the first start none is old enough, so the oldest valid one signs at once.
        distributed.or_else(|| valid().next())
    }

    /// The action that is due at `now_s`.
    pub fn due_step(&self, schedule: &RotationSchedule, now_s: u64) -> RotationStep {
        let Some(newest) = self.0.last() else { return RotationStep::Create };
        // After a year without a controller the newest has expired, and its successor signs at once.
        let is_old = newest.made_s.saturating_add(schedule.rotation_age_s) <= now_s;
        if is_old || newest.ends_s <= now_s {
            return RotationStep::Create;
        }
        let [oldest, next, ..] = &self.0[..] else { return RotationStep::None };
        // One overlap until `next` signs, and another until nothing that `oldest` signed is valid.
        let replaced = next.made_s.saturating_add(2 * schedule.overlap_s) <= now_s;
        if replaced || oldest.ends_s <= now_s {
            RotationStep::RemoveOldest
        } else {
            RotationStep::None
        }
    }

    /// Adds an authority, in the order of creation.
    pub fn with_authority(mut self, authority: CertificateAuthority) -> Self {
        self.0.push(authority);
        self.0.sort_by_key(|it| it.made_s);
        self
    }

    /// Removes the oldest authority.
    pub fn without_oldest(mut self) -> Self {
        self.0.drain(..self.0.len().min(1));
        self
    }

    /// Certificates of all trusted authorities, concatenated in PEM.
    pub fn pem_bundle(&self) -> String {
        self.0.iter().map(|it| it.certificate.trim_end().to_owned() + "\n").collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SCHEDULE: &RotationSchedule = &COMPONENT_SCHEDULE;
    const OVERLAP_S: u64 = COMPONENT_SCHEDULE.overlap_s;
    const ROTATION_AGE_S: u64 = COMPONENT_SCHEDULE.rotation_age_s;
    const AUTHORITY_LIFETIME_S: u64 = COMPONENT_SCHEDULE.lifetime_s;

    fn made(at: u64) -> CertificateAuthority {
        CertificateAuthority {
            certificate: format!("{at}"),
            key: String::new(),
            made_s: at,
            ends_s: at + AUTHORITY_LIFETIME_S,
        }
    }

    fn advance(all: CertificateAuthorities, now_s: u64) -> CertificateAuthorities {
        match all.due_step(SCHEDULE, now_s) {
            RotationStep::None => all,
            RotationStep::Create => all.with_authority(made(now_s)),
            RotationStep::RemoveOldest => all.without_oldest(),
        }
    }

    #[test]
    fn the_first_signs_at_once() {
        let all = advance(CertificateAuthorities::default(), 100);
        assert_eq!(all.signing_authority(SCHEDULE, 100), Some(&made(100)));
        assert_eq!(all.due_step(SCHEDULE, 100), RotationStep::None);
        // A clock that was set back changes nothing.
        assert_eq!(
            (all.signing_authority(SCHEDULE, 5), all.due_step(SCHEDULE, 5)),
            (Some(&made(100)), RotationStep::None)
        );
    }

    #[test]
    fn a_successor_is_trusted_before_it_signs_and_its_forerunner_after_it_signed() {
        let all = advance(advance(CertificateAuthorities::default(), 0), ROTATION_AGE_S);
        assert_eq!(all.all(), [made(0), made(ROTATION_AGE_S)]);
        assert_eq!(all.signing_authority(SCHEDULE, ROTATION_AGE_S + OVERLAP_S - 1), Some(&made(0)));
        assert_eq!(
            all.signing_authority(SCHEDULE, ROTATION_AGE_S + OVERLAP_S),
            Some(&made(ROTATION_AGE_S))
        );
        assert_eq!(all.due_step(SCHEDULE, ROTATION_AGE_S + 2 * OVERLAP_S - 1), RotationStep::None);
        let later = ROTATION_AGE_S + 2 * OVERLAP_S;
        assert_eq!(advance(all, later).all(), [made(ROTATION_AGE_S)]);
    }

    #[test]
    fn after_a_year_without_a_controller_a_new_one_signs_at_once() {
        let now_s = AUTHORITY_LIFETIME_S + 5;
        let all = advance(advance(CertificateAuthorities::default(), 0), now_s);
        assert_eq!(all.signing_authority(SCHEDULE, now_s), Some(&made(now_s)));
        assert_eq!(advance(all, now_s).all(), [made(now_s)]);
    }

    #[test]
    fn what_either_kind_has_signed_ends_before_its_authority_loses_trust() {
        let lifetimes = [CERTIFICATE_LIFETIME, LOCAL_CERTIFICATE_LIFETIME];
        for (schedule, lifetime) in [COMPONENT_SCHEDULE, LOCAL_SCHEDULE].iter().zip(lifetimes) {
            assert!(lifetime.as_secs() < schedule.overlap_s, "{schedule:?}");
            let last_use = schedule.rotation_age_s + 2 * schedule.overlap_s;
            assert!(last_use < schedule.lifetime_s, "{schedule:?}");
        }
    }

    #[test]
    fn no_key_is_ever_printed() {
        let authority = CertificateAuthority { key: "secret".into(), ..made(1) };
        assert!(
            !format!("{:?}", CertificateAuthorities::default().with_authority(authority))
                .contains("secret")
        );
    }

    proptest! {
        /// However irregular the rounds are, at most two authorities are trusted and one can sign. A signed certificate
        /// can be checked for its lifetime, if rounds are less than an overlap apart.
        #[test]
        fn what_was_signed_can_be_checked(steps in proptest::collection::vec(1u64..OVERLAP_S, 1..400)) {
            let (mut all, mut now) = (advance(CertificateAuthorities::default(), 0), ROTATION_AGE_S - 3_600);
            let mut signed: Vec<(u64, CertificateAuthority)> = Vec::new();
            for step in steps {
                now += step;
                all = advance(all, now);
                prop_assert!(all.all().len() <= 2);
                let signer = all.signing_authority(SCHEDULE, now).expect("one signs").clone();
                signed.push((now + CERTIFICATE_LIFETIME.as_secs(), signer));
                signed.retain(|(until, _)| *until >= now);
                for (_, authority) in &signed {
                    prop_assert!(all.all().contains(authority));
                }
            }
        }
    }
}
