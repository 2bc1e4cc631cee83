//! Pure: `config-leader-election`: timing of the lease by which one controller writes.
//!
//! Keys and messages: knative/pkg `leaderelection/config.go` at 521cb33. The defaults are shorter than Knative's 60 s,
//! 40 s and 10 s: a cold start must not wait for a leader.

use std::time::Duration;

use super::{ConfigMapSettings, keys::ConfigMapReader};
use crate::model::go_values::GoDuration;

/// `config-leader-election`, checked. A controller reads it only when it starts, as in Knative.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaderElectionConfig {
    /// `lease-duration`: time without renewal after which the lease may be taken. Default 5 s.
    pub lease_duration: Duration,
    /// `renew-deadline`: time without renewal after which a leader stops writing. Default 3 s, below `lease`.
    pub renew_deadline: Duration,
    /// `retry-period`: interval between attempts. Default 1 s, below `renew`.
    pub retry_period: Duration,
}

impl Default for LeaderElectionConfig {
    fn default() -> Self {
        let [lease, renew, retry] = [5, 3, 1].map(Duration::from_secs);
        Self { lease_duration: lease, renew_deadline: renew, retry_period: retry }
    }
}

impl ConfigMapSettings for LeaderElectionConfig {
    const NAME: &'static str = "config-leader-election";

    fn read(keys: &mut ConfigMapReader<'_>) -> Self {
        keys.accept_renamed(&[
            ("leaseDuration", "lease-duration"),
            ("renewDeadline", "renew-deadline"),
            ("retryPeriod", "retry-period"),
        ]);
        keys.accept_superseded(&[
            ("resourceLock", "lease-duration"),
            ("enabledComponents", "buckets"),
        ]);
        accept_buckets(keys);
        let mut it = Self::default();
        for (key, target) in [
            ("lease-duration", &mut it.lease_duration),
            ("renew-deadline", &mut it.renew_deadline),
            ("retry-period", &mut it.retry_period),
        ] {
            let mut span = GoDuration::from(*target);
            keys.read_duration(key, &mut span);
            if span.0 <= 0 {
                keys.add_error(format!("{key} must be greater than zero, was {span}"));
            }
            *target = span.to_duration();
        }
        let [lease, renew, retry] =
            [it.lease_duration, it.renew_deadline, it.retry_period].map(GoDuration::from);
        // A leader must stop before its lease can be taken, and must have a second attempt before it stops.
        if lease <= renew {
            keys.add_error(format!(
                "lease-duration ({lease}) must be greater than renew-deadline ({renew})"
            ));
        }
        if renew <= retry {
            keys.add_error(format!(
                "renew-deadline ({renew}) must be greater than retry-period ({retry})"
            ));
        }
        it
    }
}

/// Reads the number of leader buckets, which has no effect: one replica writes, all of them serve.
fn accept_buckets(keys: &mut ConfigMapReader<'_>) {
    let mut buckets = 1;
    keys.read_int32("buckets", &mut buckets);
    if !(1..=10).contains(&buckets) {
        keys.add_error(format!("buckets: value must be between 1 <= {buckets} <= 10"));
    } else if buckets > 1 {
        keys.add_warning("buckets has no effect: one controller writes, and all of them serve");
    }
    keys.ignore_prefix("map-lease-prefix", "one lease is held");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{
        config_maps::{ParsedConfigMap, read},
        problem::problems_line,
    };

    fn map(pairs: &[(&str, &str)]) -> Result<ParsedConfigMap<LeaderElectionConfig>, String> {
        let data = pairs.iter().map(|&(key, text)| (key.into(), text.into())).collect();
        read::<LeaderElectionConfig>(&data).map_err(|it| problems_line(&it))
    }

    #[test]
    fn spans_are_followed_also_by_their_older_names() {
        let [lease, renew, retry] = [60, 40, 10].map(Duration::from_secs);
        let expected = LeaderElectionConfig {
            lease_duration: lease,
            renew_deadline: renew,
            retry_period: retry,
        };
        let read = map(&[
            ("lease-duration", "60s"),
            ("renewDeadline", "40s"),
            ("retry-period", "10s"),
            ("map-lease-prefix.a.b", "c"),
        ]);
        let read = read.unwrap();
        assert_eq!(read.value, expected);
        assert_eq!(read.warnings.len(), 2, "{:?}", read.warnings);
    }

    #[test]
    fn a_lease_that_could_not_be_held_is_refused() {
        for (pair, expected) in [
            (("buckets", "11"), "buckets: value must be between 1 <= 11 <= 10"),
            (("retry-period", "0s"), "retry-period must be greater than zero, was 0s"),
            (
                ("renew-deadline", "5s"),
                "lease-duration (5s) must be greater than renew-deadline (5s)",
            ),
            (("retry-period", "3s"), "renew-deadline (3s) must be greater than retry-period (3s)"),
        ] {
            assert_eq!(map(&[pair]), Err(expected.to_owned()));
        }
    }
}
