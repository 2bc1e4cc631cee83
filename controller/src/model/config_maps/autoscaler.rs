//! Pure: `config-autoscaler`: scaling of Revisions without annotations of their own.
//!
//! Keys, defaults, bounds and messages: knative/serving `pkg/autoscaler/config/config.go` at 98e5ef9. Two shipped
//! defaults differ, see [`scale_policy`](crate::model::scale_policy).

use super::{ConfigMapSettings, keys::ConfigMapReader};
use crate::model::{
    go_values::GoDuration,
    scale_policy::{KPA_CLASS, ScalePolicyConfig, TARGET_MIN},
    standby_policy::{self, MAX_STANDBY_PODS, StandbyConfig},
};

/// Least and greatest stable window (`autoscaling.WindowMin`, `WindowMax`).
const WINDOW_BOUNDS: (GoDuration, GoDuration) =
    (GoDuration::from_secs(6), GoDuration::from_secs(3600));

impl ConfigMapSettings for ScalePolicyConfig {
    const NAME: &'static str = "config-autoscaler";

    fn read(keys: &mut ConfigMapReader<'_>) -> Self {
        // As in Knative, the prefix stands before parse errors only, not before broken bounds.
        keys.set_error_prefix("failed to parse data: ");
        accept_older_keys(keys);
        read_class(keys);
        let mut it = Self::default();
        keys.read_bool("enable-scale-to-zero", &mut it.policy.scale_to_zero);
        keys.read_bool("allow-zero-initial-scale", &mut it.allow_zero_initial_scale);
        read_targets(keys, &mut it);
        read_rates(keys, &mut it);
        read_windows(keys, &mut it);
        read_scales(keys, &mut it);
        read_standby(keys, &mut it.standby);
        it
    }
}

fn accept_older_keys(keys: &mut ConfigMapReader<'_>) {
    // The values of these keys have lost their meaning, so none is passed on to its successor.
    keys.accept_superseded(&[
        ("panic-window", "panic-window-percentage"),
        ("container-concurrency-target-single", "container-concurrency-target-default"),
        ("container-concurrency-target-multi", "container-concurrency-target-default"),
        ("single-concurrency-target", "container-concurrency-target-default"),
        ("multi-concurrency-target", "container-concurrency-target-default"),
        ("vpa-multi-concurrency-target", "container-concurrency-target-default"),
        ("concurrency-quantum-of-time", "stable-window"),
    ]);
    keys.accept_without_effect(&[
        ("tick-interval", "load is evaluated every 2 s, and at once where it cannot wait"),
        ("enable-graceful-scaledown", "pods with the least in flight always leave first"),
        ("enable-vertical-pod-autoscaling", "use a VerticalPodAutoscaler"),
        (
            "scale-to-zero-threshold",
            "use \"stable-window\" and \"scale-to-zero-pod-retention-period\"",
        ),
    ]);
}

fn read_class(keys: &mut ConfigMapReader<'_>) {
    let mut class = KPA_CLASS.to_owned();
    keys.read_text("pod-autoscaler-class", &mut class);
    if class != KPA_CLASS {
        keys.add_warning(format!(
            "pod-autoscaler-class = {class:?} has no effect: a service that names no class is of {KPA_CLASS}; name \
             another in its annotation autoscaling.knative.dev/class"
        ));
    }
}

/// Reads the targets of a pod: concurrency, rate, utilization, burst capacity.
fn read_targets(keys: &mut ConfigMapReader<'_>, config: &mut ScalePolicyConfig) {
    let p = &mut config.policy;
    keys.read_float("container-concurrency-target-percentage", &mut p.target_utilization);
    keys.read_float("container-concurrency-target-default", &mut p.target_total);
    keys.read_float("requests-per-second-target-default", &mut config.rps_target);
    keys.read_float("target-burst-capacity", &mut p.target_burst_capacity);
    keys.read_float("activator-capacity", &mut p.activator_capacity);
    // Older releases wrote a share up to 1 instead of a percentage, and Knative still accepts it.
    if p.target_utilization > 1.0 {
        p.target_utilization /= 100.0;
    }
    let (burst, share) = (p.target_burst_capacity, p.target_utilization);
    // -1 is exact in a float, so its bits can be compared: it means unlimited.
    if burst < 0.0 && burst.to_bits() != (-1.0_f64).to_bits() {
        keys.add_error(format!(
            "target-burst-capacity must be either non-negative or -1 (for unlimited), was: {burst:.6}"
        ));
    }
    if share <= 0.0 || share > 1.0 {
        keys.add_error(format!(
            "container-concurrency-target-percentage = {share:.6} is outside of valid range of (0, 100]"
        ));
    } else if share * p.target_total < TARGET_MIN {
        // Each key may be valid alone: their product is the target that a pod gets.
        keys.add_error(format!(
            "container-concurrency-target-percentage and container-concurrency-target-default yield target \
             concurrency of {}, can't be less than {TARGET_MIN}",
            share * p.target_total
        ));
    }
    if config.rps_target < TARGET_MIN {
        keys.add_error(format!(
            "requests-per-second-target-default must be at least {TARGET_MIN}, was: {}",
            config.rps_target
        ));
    }
    if p.activator_capacity < 1.0 {
        keys.add_error(format!(
            "activator-capacity = {}, must be at least 1",
            p.activator_capacity
        ));
    }
    // ServerlessServices report a number computed from it, as in Knative. Nothing else depends on it.
    keys.warn_unless_usual(
        "activator-capacity",
        &["100", "100.0"],
        "two activators serve each name",
    );
}

/// Reads the rates of scaling up and down, and the bounds of the panic window.
fn read_rates(keys: &mut ConfigMapReader<'_>, config: &mut ScalePolicyConfig) {
    let p = &mut config.policy;
    for (key, rate) in [
        ("max-scale-up-rate", &mut p.max_scale_up_rate),
        ("max-scale-down-rate", &mut p.max_scale_down_rate),
    ] {
        keys.read_float(key, rate);
        // At 1 the number of pods could never change.
        if *rate <= 1.0 {
            keys.add_error(format!("{key} = {rate}, must be greater than 1.0"));
        }
    }
    keys.read_float("panic-threshold-percentage", &mut p.panic_threshold_percent);
    keys.read_float("panic-window-percentage", &mut p.panic_window_percent);
    let panic = p.panic_window_percent;
    if !(1.0..=100.0).contains(&panic) {
        keys.add_error(format!("panic-window-percentage = {panic}, must be in [1, 100] interval"));
    }
}

/// Reads the windows, delays and periods, by Knative's bounds.
fn read_windows(keys: &mut ConfigMapReader<'_>, config: &mut ScalePolicyConfig) {
    let p = &mut config.policy;
    let precision = |key, span: GoDuration| {
        format!("{key} = {span}, must be specified with at most second precision")
    };
    let mut window = GoDuration::from(p.stable_window);
    keys.read_duration("stable-window", &mut window);
    if window < WINDOW_BOUNDS.0 || window > WINDOW_BOUNDS.1 {
        let (low, high) = WINDOW_BOUNDS;
        keys.add_error(format!("stable-window = {window}, must be in [{low}; {high}] range"));
    }
    // Knative averages load in buckets of one second.
    if !window.is_whole_seconds() {
        keys.add_error(precision("stable-window", window));
    }
    let mut delay = GoDuration::from(p.scale_down_delay);
    keys.read_duration("scale-down-delay", &mut delay);
    if delay.0 < 0 {
        keys.add_error(format!("scale-down-delay cannot be negative, was: {delay}"));
    }
    if !delay.is_whole_seconds() {
        keys.add_error(precision("scale-down-delay", delay));
    }
    // The value is read only to be checked: nothing waits before zero here.
    let mut grace = GoDuration::from_secs(30);
    keys.read_duration("scale-to-zero-grace-period", &mut grace);
    if grace.0 <= 0 {
        keys.add_error(format!("scale-to-zero-grace-period must be positive, was: {grace}"));
    }
    keys.warn_unless_usual(
        "scale-to-zero-grace-period",
        &["30s"],
        "nothing is waited for before zero: use scale-to-zero-pod-retention-period to keep the last pod",
    );
    let mut retention = GoDuration::from(p.scale_to_zero_retention_period);
    keys.read_duration("scale-to-zero-pod-retention-period", &mut retention);
    if retention.0 < 0 {
        let key = "scale-to-zero-pod-retention-period";
        keys.add_error(format!("{key} cannot be negative, was: {retention}"));
    }
    (p.stable_window, p.scale_down_delay) = (window.to_duration(), delay.to_duration());
    p.scale_to_zero_retention_period = retention.to_duration();
}

/// Reads the numbers of pods with which Revisions start and wake, and their bounds.
fn read_scales(keys: &mut ConfigMapReader<'_>, config: &mut ScalePolicyConfig) {
    let p = &mut config.policy;
    // The numbers stay signed while they are checked, so that a refusal shows what was written.
    let [mut initial, mut min, mut max] =
        [p.initial_scale, p.min_scale, p.max_scale].map(i64::from);
    let mut limit = i64::from(config.max_scale_limit);
    keys.read_int32("initial-scale", &mut initial);
    keys.read_int32("min-scale", &mut min);
    keys.read_int32("max-scale", &mut max);
    keys.read_int32("max-scale-limit", &mut limit);
    if initial < 0 || (initial == 0 && !config.allow_zero_initial_scale) {
        keys.add_error(format!(
            "initial-scale = {initial}, must be at least 0 (or at least 1 when allow-zero-initial-scale is false)"
        ));
    }
    if min < 0 {
        keys.add_error(format!("min-scale = {min}, must be at least 0"));
    }
    // Where there is a limit, 0 (no maximum) would exceed it.
    let least = i64::from(limit > 0);
    if max < least || (limit > 0 && max > limit) {
        keys.add_error(format!(
            "max-scale = {max}, must be in [{least}, max-scale-limit({limit})] range"
        ));
    }
    if limit < 0 {
        keys.add_error(format!("max-scale-limit = {limit}, must be at least 0"));
    }
    if min > max && max > 0 {
        keys.add_error(format!("min-scale ({min}) must be less than max-scale ({max})"));
    }
    // Negative numbers were refused above, and with them the whole ConfigMap.
    let number = |count: i64| u32::try_from(count).unwrap_or(0);
    (p.initial_scale, p.min_scale, p.max_scale) = (number(initial), number(min), number(max));
    config.max_scale_limit = number(limit);
}

/// Reads the keys of standby, which are Rouse's own.
fn read_standby(keys: &mut ConfigMapReader<'_>, config: &mut StandbyConfig) {
    let mut pods = i64::from(config.policy.pods);
    keys.read_int32("standby", &mut pods);
    match u32::try_from(pods) {
        Ok(pods) if pods <= MAX_STANDBY_PODS => config.policy.pods = pods,
        Ok(_) | Err(_) => {
            keys.add_error(format!("standby = {pods}, must be in [0, {MAX_STANDBY_PODS}] range"));
        }
    }
    let mut memory = "keep".to_owned();
    keys.read_text("standby-memory", &mut memory);
    match standby_policy::parse_reclaims_memory(&memory) {
        Some(reclaims_memory) => config.policy.reclaims_memory = reclaims_memory,
        None => {
            keys.add_error(format!("standby-memory = {memory:?}, must be \"keep\" or \"reclaim\""));
        }
    }
    // Without the key a pod stands by without limit, which no duration expresses.
    let has_ttl = keys.get("standby-ttl").is_some();
    // A text that is no duration leaves this one, so that it is reported only once.
    let mut ttl = GoDuration::from_secs(1);
    keys.read_duration("standby-ttl", &mut ttl);
    if ttl.0 <= 0 {
        keys.add_error(format!("standby-ttl must be positive, was: {ttl}"));
    }
    config.policy.ttl = has_ttl.then(|| ttl.to_duration());
    let mut timeout = GoDuration::from(config.agent_timeout);
    keys.read_duration("standby-agent-timeout", &mut timeout);
    match standby_policy::check_agent_timeout(timeout) {
        Ok(timeout) => config.agent_timeout = timeout,
        Err(message) => keys.add_error(message),
    }
    keys.read_bool("standby-resize", &mut config.resizes_pods);
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::model::{config_maps::read, problem::problems_line, standby_policy::StandbyPolicy};

    fn map(pairs: &[(&str, &str)]) -> Result<ScalePolicyConfig, String> {
        let data = pairs.iter().map(|&(key, text)| (key.into(), text.into())).collect();
        read::<ScalePolicyConfig>(&data).map(|it| it.value).map_err(|it| problems_line(&it))
    }

    #[test]
    fn an_empty_config_map_has_rouses_defaults() {
        assert_eq!(map(&[]), Ok(ScalePolicyConfig::default()));
        assert!(ScalePolicyConfig::default().policy.target_burst_capacity.abs() < f64::EPSILON);
    }

    #[test]
    fn every_key_is_followed() {
        let read = map(&[
            ("container-concurrency-target-percentage", "50"),
            ("container-concurrency-target-default", "10.5"),
            ("requests-per-second-target-default", "12"),
            ("target-burst-capacity", "-1"),
            ("stable-window", "2m"),
            ("panic-window-percentage", "20"),
            ("panic-threshold-percentage", "110"),
            ("max-scale-up-rate", "1.1"),
            ("max-scale-down-rate", "3"),
            ("enable-scale-to-zero", "false"),
            ("scale-to-zero-grace-period", "1s"),
            ("scale-to-zero-pod-retention-period", "1m1s"),
            ("activator-capacity", "95"),
            ("initial-scale", "3"),
            ("allow-zero-initial-scale", "false"),
            ("min-scale", "2"),
            ("max-scale", "9"),
            ("max-scale-limit", "10"),
            ("scale-down-delay", "15m"),
        ]);
        let mut expected = ScalePolicyConfig::default();
        let p = &mut expected.policy;
        (p.target_utilization, p.target_total, p.target_burst_capacity) = (0.5, 10.5, -1.0);
        (expected.rps_target, expected.max_scale_limit, expected.allow_zero_initial_scale) =
            (12.0, 10, false);
        (p.stable_window, p.panic_window_percent) = (Duration::from_secs(120), 20.0);
        (p.panic_threshold_percent, p.activator_capacity) = (110.0, 95.0);
        (p.max_scale_up_rate, p.max_scale_down_rate, p.scale_to_zero) = (1.1, 3.0, false);
        p.scale_to_zero_retention_period = Duration::from_secs(61);
        (p.initial_scale, p.min_scale, p.max_scale) = (3, 2, 9);
        p.scale_down_delay = Duration::from_secs(900);
        assert_eq!(read, Ok(expected));
    }

    #[test]
    fn every_key_of_standby_is_followed() {
        let read = map(&[
            ("standby", "3"),
            ("standby-memory", "reclaim"),
            ("standby-ttl", "36h"),
            ("standby-agent-timeout", "1s"),
            ("standby-resize", "false"),
        ]);
        let ttl = Some(Duration::from_secs(129_600));
        let standby = StandbyConfig {
            policy: StandbyPolicy { pods: 3, reclaims_memory: true, ttl },
            agent_timeout: Duration::from_secs(1),
            resizes_pods: false,
        };
        assert_eq!(read, Ok(ScalePolicyConfig { standby, ..ScalePolicyConfig::default() }));
        let keep = map(&[("standby-memory", "keep"), ("standby", "0")]);
        assert_eq!(keep, Ok(ScalePolicyConfig::default()));
    }

    #[test]
    fn bounds_of_standby_are_refused() {
        for (key, value, error) in [
            ("standby", "11", "standby = 11, must be in [0, 10] range"),
            ("standby", "-1", "standby = -1, must be in [0, 10] range"),
            (
                "standby-memory",
                "swap",
                "standby-memory = \"swap\", must be \"keep\" or \"reclaim\"",
            ),
            ("standby-ttl", "0s", "standby-ttl must be positive, was: 0s"),
            (
                "standby-ttl",
                "day",
                "failed to parse data: failed to parse \"standby-ttl\": time: invalid duration \"day\"",
            ),
            (
                "standby-agent-timeout",
                "5ms",
                "standby-agent-timeout = 5ms, must be in [10ms; 1m0s] range",
            ),
            (
                "standby-agent-timeout",
                "2m",
                "standby-agent-timeout = 2m0s, must be in [10ms; 1m0s] range",
            ),
            (
                "standby-resize",
                "maybe",
                "failed to parse data: failed to parse \"standby-resize\": strconv.ParseBool: parsing \
                 \"maybe\": invalid syntax",
            ),
        ] {
            assert_eq!(map(&[(key, value)]), Err(error.to_owned()), "{key}");
        }
    }

    /// Keys of the sample of Knative's first releases (`config/config-autoscaler.yaml`, 2018).
    #[test]
    fn keys_of_the_oldest_releases_name_their_successors_and_change_nothing() {
        let older = [
            ("multi-concurrency-target", "1.0", "container-concurrency-target-default"),
            ("single-concurrency-target", "0.9", "container-concurrency-target-default"),
            ("vpa-multi-concurrency-target", "10.0", "container-concurrency-target-default"),
            ("concurrency-quantum-of-time", "100ms", "stable-window"),
        ];
        for (key, value, successor) in older {
            let data = [(key.to_owned(), value.to_owned())].into();
            let read = read::<ScalePolicyConfig>(&data).unwrap();
            assert_eq!(read.value, ScalePolicyConfig::default(), "{key}");
            let warnings =
                format!("key {key:?} is of an older release and has no effect: use {successor:?}");
            assert_eq!(read.warnings, [warnings]);
        }
    }

    /// Idle time before zero, in Knative's first release.
    #[test]
    fn a_warning_recommends_only_keys_that_have_an_effect() {
        let data = [("scale-to-zero-threshold".to_owned(), "5m".to_owned())].into();
        let warnings = read::<ScalePolicyConfig>(&data).unwrap().warnings.join("");
        let (_, advice) = warnings.split_once("use ").unwrap();
        let keys: Vec<&str> = advice.split('"').skip(1).step_by(2).collect();
        assert_eq!(keys, ["stable-window", "scale-to-zero-pod-retention-period"]);
        for key in keys {
            assert_ne!(map(&[(key, "2m")]), map(&[]), "{key}");
        }
    }

    #[test]
    fn a_target_percentage_up_to_1_is_a_fraction() {
        let share = map(&[("container-concurrency-target-percentage", "0.7")]).unwrap();
        assert!((share.policy.target_utilization - 0.7).abs() < f64::EPSILON);
    }

    #[test]
    fn every_bound_is_refused_in_knatives_words() {
        for (pairs, expected) in [
            (
                &[("max-scale-up-rate", "not a float")][..],
                "failed to parse data: failed to parse \"max-scale-up-rate\": strconv.ParseFloat: \
                 parsing \"not a float\": invalid syntax",
            ),
            (
                &[("target-burst-capacity", "-2")],
                "target-burst-capacity must be either non-negative or -1 (for unlimited), was: -2.000000",
            ),
            (
                &[("container-concurrency-target-percentage", "101")],
                "container-concurrency-target-percentage = 1.010000 is outside of valid range of (0, 100]",
            ),
            (
                &[("container-concurrency-target-default", "0.01")],
                "container-concurrency-target-percentage and container-concurrency-target-default yield \
                 target concurrency of 0.006999999999999999, can't be less than 0.01",
            ),
            (
                &[("requests-per-second-target-default", "-1")],
                "requests-per-second-target-default must be at least 0.01, was: -1",
            ),
            (&[("activator-capacity", "0.5")], "activator-capacity = 0.5, must be at least 1"),
            (&[("max-scale-up-rate", "1")], "max-scale-up-rate = 1, must be greater than 1.0"),
            (
                &[("max-scale-down-rate", "0.5")],
                "max-scale-down-rate = 0.5, must be greater than 1.0",
            ),
            (&[("stable-window", "5s")], "stable-window = 5s, must be in [6s; 1h0m0s] range"),
            (
                &[("stable-window", "6500ms")],
                "stable-window = 6.5s, must be specified with at most second precision",
            ),
            (
                &[("panic-window-percentage", "110")],
                "panic-window-percentage = 110, must be in [1, 100] interval",
            ),
            (&[("scale-down-delay", "-1s")], "scale-down-delay cannot be negative, was: -1s"),
            (
                &[("scale-to-zero-grace-period", "0s")],
                "scale-to-zero-grace-period must be positive, was: 0s",
            ),
            (
                &[("initial-scale", "0"), ("allow-zero-initial-scale", "false")],
                "initial-scale = 0, must be at least 0 (or at least 1 when allow-zero-initial-scale is false)",
            ),
            (&[("min-scale", "-1")], "min-scale = -1, must be at least 0"),
            (
                &[("max-scale-limit", "5")],
                "max-scale = 0, must be in [1, max-scale-limit(5)] range",
            ),
            (
                &[("min-scale", "3"), ("max-scale", "2")],
                "min-scale (3) must be less than max-scale (2)",
            ),
        ] {
            assert_eq!(map(pairs), Err(expected.to_owned()), "{pairs:?}");
        }
    }
}
