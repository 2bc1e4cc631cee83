//! Pure: `config-gc`: retention of Revisions without a Route.
//!
//! Keys, defaults, bounds and messages: knative/serving `pkg/gc/config.go` at 98e5ef9.

use std::time::Duration;

use super::{ConfigMapSettings, keys::ConfigMapReader};
use crate::model::go_values::{GoDuration, parse_duration, parse_uint};

/// `config-gc`, checked against its bounds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GcConfig {
    /// `retain-since-create-time`: age up to which a Revision stays; `None`: `disabled`. Default 48 h.
    pub since_created: Option<Duration>,
    /// `retain-since-last-active-time`: time since the last use up to which a Revision stays; `None`: `disabled`.
    /// Default 15 h.
    pub since_active: Option<Duration>,
    /// `min-non-active-revisions`: number of Revisions that stay whatever their age. Default 20.
    pub min_non_active: u64,
    /// `max-non-active-revisions`: number beyond which the oldest go whatever their age; `None`: `disabled`. Default
    /// 1000.
    pub max_non_active: Option<u64>,
}

impl Default for GcConfig {
    fn default() -> Self {
        Self {
            since_created: Some(Duration::from_secs(48 * 3600)),
            since_active: Some(Duration::from_secs(15 * 3600)),
            min_non_active: 20,
            max_non_active: Some(1000),
        }
    }
}

impl ConfigMapSettings for GcConfig {
    const NAME: &'static str = "config-gc";

    fn read(keys: &mut ConfigMapReader<'_>) -> Self {
        keys.accept_renamed(&[
            ("stale-revision-create-delay", "retain-since-create-time"),
            ("stale-revision-timeout", "retain-since-last-active-time"),
            ("stale-revision-minimum-generations", "min-non-active-revisions"),
        ]);
        let pinned = "routes are remembered with their Revisions";
        keys.accept_without_effect(&[("stale-revision-lastpinned-debounce", pinned)]);
        // As in Knative, the prefix stands before parse errors only, not before broken bounds.
        keys.set_error_prefix("failed to parse data: ");
        let mut it = Self::default();
        read_duration(keys, "retain-since-create-time", &mut it.since_created);
        read_duration(keys, "retain-since-last-active-time", &mut it.since_active);
        // Read as a signed number, as in Knative: a negative one has a message of its own.
        let mut min = i64::try_from(it.min_non_active).unwrap_or(i64::MAX);
        keys.read_int64("min-non-active-revisions", &mut min);
        read_max_non_active(keys, &mut it.max_non_active);
        match u64::try_from(min) {
            Ok(min) => it.min_non_active = min,
            Err(_negative) => {
                keys.add_error(format!(
                    "min-non-active-revisions must be non-negative, was: {min}"
                ));
            }
        }
        if let Some(max) = it.max_non_active.filter(|max| it.min_non_active > *max) {
            keys.add_error(format!(
                "min-non-active-revisions({}) must be <= max-non-active-revisions({max})",
                it.min_non_active
            ));
        }
        it
    }
}

/// Reads a duration or `disabled`; an empty value keeps the default.
fn read_duration(keys: &mut ConfigMapReader<'_>, key: &'static str, target: &mut Option<Duration>) {
    // Trimmed, since Knative trims these values before it parses them.
    let text = keys.get(key).unwrap_or_default().trim();
    if text.is_empty() {
        return;
    }
    if text.eq_ignore_ascii_case("disabled") {
        *target = None;
        return;
    }
    match parse_duration(text) {
        Ok(GoDuration(nanos)) if nanos < 0 => {
            keys.add_error(format!("failed to parse {key}: must be non-negative"));
        }
        Ok(span) => *target = Some(span.to_duration()),
        Err(error) => keys.add_error(format!("failed to parse {key}: {error}")),
    }
}

/// Reads a number or `disabled`; an empty value keeps the default.
fn read_max_non_active(keys: &mut ConfigMapReader<'_>, target: &mut Option<u64>) {
    let key = "max-non-active-revisions";
    let text = keys.get(key).unwrap_or_default().trim();
    if text.is_empty() {
        return;
    }
    if text.eq_ignore_ascii_case("disabled") {
        *target = None;
        return;
    }
    // Knative stores the number in an `int64`.
    let most = i64::MAX.unsigned_abs();
    match parse_uint(text) {
        Ok(max) if max <= most => *target = Some(max),
        Ok(_) => {
            keys.add_error(format!("failed to parse {key}: value should be lower than {most}"))
        }
        Err(error) => keys.add_error(format!("failed to parse {key}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{
        config_maps::{ParsedConfigMap, read},
        problem::problems_line,
    };

    fn map(pairs: &[(&str, &str)]) -> Result<ParsedConfigMap<GcConfig>, String> {
        let data = pairs.iter().map(|&(key, text)| (key.into(), text.into())).collect();
        read::<GcConfig>(&data).map_err(|it| problems_line(&it))
    }

    #[test]
    fn each_bound_can_be_set_and_switched_off() {
        assert_eq!(map(&[]).map(|it| it.value), Ok(GcConfig::default()));
        let off = GcConfig {
            since_created: None,
            since_active: None,
            min_non_active: 0,
            max_non_active: None,
        };
        let read = map(&[
            ("retain-since-create-time", "Disabled"),
            ("retain-since-last-active-time", "disabled"),
            ("min-non-active-revisions", "0"),
            ("max-non-active-revisions", "DISABLED"),
        ]);
        assert_eq!(read, Ok(ParsedConfigMap { value: off, warnings: vec![] }));
        let set = GcConfig {
            since_created: Some(Duration::from_secs(600)),
            since_active: Some(Duration::ZERO),
            min_non_active: 1,
            max_non_active: Some(2),
        };
        let read = map(&[
            ("retain-since-create-time", "10m"),
            ("retain-since-last-active-time", "0s"),
            ("min-non-active-revisions", "1"),
            ("max-non-active-revisions", "2"),
        ]);
        assert_eq!(read, Ok(ParsedConfigMap { value: set, warnings: vec![] }));
    }

    #[test]
    fn keys_of_older_releases_count_until_their_successor_is_set() {
        let older = ("stale-revision-create-delay", "24h");
        let warning = "key \"stale-revision-create-delay\" is of an older release: \
                       use \"retain-since-create-time\"";
        let day =
            GcConfig { since_created: Some(Duration::from_secs(86_400)), ..GcConfig::default() };
        let expected = ParsedConfigMap { value: day, warnings: vec![warning.to_owned()] };
        assert_eq!(map(&[older]), Ok(expected));
        let both = map(&[older, ("retain-since-create-time", "1h")]).unwrap();
        assert_eq!(both.value.since_created, Some(Duration::from_secs(3600)));
    }

    #[test]
    fn every_refusal_is_in_knatives_words() {
        for (pairs, expected) in [
            (
                &[("retain-since-create-time", "invalid")][..],
                "failed to parse retain-since-create-time: time: invalid duration \"invalid\"",
            ),
            (
                &[("retain-since-last-active-time", "-1h")],
                "failed to parse retain-since-last-active-time: must be non-negative",
            ),
            (
                &[("min-non-active-revisions", "-1")],
                "min-non-active-revisions must be non-negative, was: -1",
            ),
            (
                &[("max-non-active-revisions", "-1")],
                "failed to parse max-non-active-revisions: strconv.ParseUint: parsing \"-1\": invalid syntax",
            ),
            // Unlike the minimum, which may have a sign.
            (
                &[("max-non-active-revisions", "+30"), ("min-non-active-revisions", "+5")],
                "failed to parse max-non-active-revisions: strconv.ParseUint: parsing \"+30\": invalid syntax",
            ),
            (
                &[("min-non-active-revisions", "20"), ("max-non-active-revisions", "10")],
                "min-non-active-revisions(20) must be <= max-non-active-revisions(10)",
            ),
        ] {
            assert_eq!(map(pairs), Err(expected.to_owned()));
        }
    }
}
