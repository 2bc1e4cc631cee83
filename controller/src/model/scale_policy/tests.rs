use super::*;

fn annotated(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs
        .iter()
        .map(|(name, value)| (format!("{AUTOSCALING_PREFIX}{name}"), (*value).to_owned()))
        .collect()
}

fn policy(pairs: &[(&str, &str)], hard_limit: u32) -> Result<ScalePolicy, String> {
    let read = ScalePolicyConfig::default().strict_policy(&annotated(pairs), hard_limit, "a");
    read.map_err(|problems| crate::model::problem::problems_line(&problems))
}

/// Every `autoscaling.knative.dev/*` annotation of a Revision and its alternate in camel case (knative/serving
/// `pkg/apis/autoscaling/register.go` at 98e5ef9).
#[test]
fn annotations_and_their_alternates_mean_the_same() {
    for (kebab, camel, value) in [
        ("min-scale", "minScale", "2"),
        ("max-scale", "maxScale", "3"),
        ("initial-scale", "initialScale", "4"),
        ("activation-scale", "activationScale", "5"),
        ("scale-down-delay", "scaleDownDelay", "6s"),
        ("target-utilization-percentage", "targetUtilizationPercentage", "7"),
        ("target-burst-capacity", "targetBurstCapacity", "-1"),
        ("panic-window-percentage", "panicWindowPercentage", "9"),
        ("panic-threshold-percentage", "panicThresholdPercentage", "110"),
        ("scale-to-zero-pod-retention-period", "scaleToZeroPodRetentionPeriod", "11s"),
        ("metric-aggregation-algorithm", "metricAggregationAlgorithm", "weighted-exponential"),
    ] {
        let (one, other) = (policy(&[(kebab, value)], 0), policy(&[(camel, value)], 0));
        assert_eq!(one, other, "{kebab}");
        assert_ne!(one, policy(&[], 0), "{kebab}");
    }
}

/// Bounds and messages of knative/serving `pkg/apis/autoscaling/annotation_validation.go` at 98e5ef9.
#[test]
fn annotations_out_of_bounds_are_refused_in_knatives_words() {
    let at = |name: &str| format!(": a.{AUTOSCALING_PREFIX}{name}");
    for (name, value, message) in [
        ("class", "vpa.autoscaling.knative.dev", "invalid value: vpa.autoscaling.knative.dev"),
        ("metric", "cpu", "invalid value: cpu"),
        ("target", "0.001", "target 0.001 should be at least 0.01"),
        ("target", "many", "invalid value: many"),
        ("target-utilization-percentage", "0", "expected 1 <= 0 <= 100"),
        ("min-scale", "-1", "expected 0 <= -1 <= 2147483647"),
        ("max-scale", "x", "invalid value: x"),
        ("min-scale", "99999999999999999999", "expected 0 <= 99999999999999999999 <= 2147483647"),
        ("initial-scale", "x", "invalid value: x"),
        ("activation-scale", "1", "activation-scale=1 must be greater than 1"),
        ("window", "5s", "expected 6s <= 5s <= 1h0m0s"),
        ("window", "2h", "expected 6s <= 2h <= 1h0m0s"),
        ("window", "-6s", "expected 6s <= -6s <= 1h0m0s"),
        ("window", "6500ms", "must be specified with at most second precision"),
        ("window", "6", "invalid value: 6"),
        ("scale-down-delay", "1s500ms", "must be specified with at most second precision"),
        ("scale-to-zero-pod-retention-period", "61m", "expected 0s <= 61m <= 1h0m0s"),
        ("panic-threshold-percentage", "109", "expected 110 <= 109 <= 1000"),
    ] {
        let refused = policy(&[(name, value)], 0).expect_err(name);
        assert!(refused.starts_with(&format!("{message}{}", at(name))), "{name}: {refused}");
    }
    let refused = policy(&[("initial-scale", "-1")], 0).expect_err("negative");
    assert_eq!(refused, format!("invalid value: -1{} must be greater than 0", at("initial-scale")));
    let median = ("metric-aggregation-algorithm", "median");
    let refused = policy(&[("class", KPA_CLASS), median], 0).expect_err("no such algorithm");
    assert!(refused.starts_with("invalid value: median"), "{refused}");
}

/// Rule of knative/serving `pkg/apis/autoscaling/annotation_validation.go`: other autoscalers' values are not checked.
#[test]
fn annotations_of_other_classes_are_left_to_them() {
    for pairs in [
        &[("class", "hpa.autoscaling.knative.dev"), ("metric", "cpu")][..],
        &[("class", "keda.example.com"), ("metric", "queue-length")],
        &[("metric-aggregation-algorithm", "median")],
    ] {
        assert!(policy(pairs, 0).is_ok(), "{pairs:?}");
    }
    let nothing = [("class", "hpa.autoscaling.knative.dev"), ("metric", "")];
    assert!(policy(&nothing, 0).is_err());
}

/// Kubernetes refuses a HorizontalPodAutoscaler with such a metric, so the Revision would never be scaled.
#[test]
fn metrics_that_no_horizontal_pod_autoscaler_may_have_are_refused() {
    let of_class_hpa = |pairs: &[(&str, &str)]| {
        let class = ("class", HPA_CLASS);
        policy(&[&[class][..], pairs].concat(), 0)
    };
    for (pairs, message) in [
        (&[("metric", "a/b")][..], "invalid value: a/b"),
        (&[("metric", "..")], "invalid value: .."),
        (&[("metric", "memory"), ("target", "0.5")], "target 0.5 should be at least 1"),
        (&[("metric", "queue"), ("target", "0.99")], "target 0.99 should be at least 1"),
    ] {
        let refused = of_class_hpa(pairs).expect_err("no such metric");
        assert!(refused.starts_with(message), "{pairs:?}: {refused}");
    }
    for pairs in [
        &[("metric", "cpu"), ("target", "0.5")][..],
        &[("target", "0.5")],
        &[("metric", "memory"), ("target", "1.5")],
        &[("metric", "a.b_c-d")],
    ] {
        assert!(of_class_hpa(pairs).is_ok(), "{pairs:?}");
    }
}

/// Contradictions between minimum, maximum, initial and activation scale, with Knative's messages
/// (knative/serving `pkg/apis/autoscaling/annotation_validation.go` at 98e5ef9).
#[test]
fn scales_that_contradict_each_other_are_refused() {
    for (pairs, message) in [
        (&[("min-scale", "3"), ("max-scale", "2")][..], "max-scale=2 is less than min-scale=3"),
        (
            &[("min-scale", "3"), ("activation-scale", "2")],
            "min-scale=3 is greater than activation-scale=2",
        ),
        (
            &[("activation-scale", "4"), ("max-scale", "2")],
            "max-scale=2 is less than activation-scale=4",
        ),
    ] {
        let refused = policy(pairs, 0).expect_err("contradiction");
        assert!(refused.starts_with(message), "{refused}");
    }
    let strict =
        ScalePolicyConfig { allow_zero_initial_scale: false, ..ScalePolicyConfig::default() };
    let refused = strict.strict_policy(&annotated(&[("initial-scale", "0")]), 0, "a");
    let refused = crate::model::problem::problems_line(&refused.expect_err("not allowed"));
    let expected =
        "invalid value: 0: a.autoscaling.knative.dev/initial-scale=0 not allowed by cluster";
    assert_eq!(refused, expected);
}

#[test]
fn max_scale_is_bounded_by_max_scale_limit() {
    let limited = ScalePolicyConfig { max_scale_limit: 10, ..ScalePolicyConfig::default() };
    let refused = |value| {
        let read = limited.strict_policy(&annotated(&[("max-scale", value)]), 0, "a");
        read.map_err(|problems| crate::model::problem::problems_line(&problems))
            .expect_err("over the limit")
    };
    let at = format!("a.{AUTOSCALING_PREFIX}max-scale");
    assert_eq!(refused("11"), format!("expected 1 <= 11 <= 10: {at}"));
    assert_eq!(refused("0"), format!("max-scale=0 (unlimited), must be less than 10: {at}"));
    assert!(
        limited.strict_policy(&annotated(&[]), 0, "a").is_ok(),
        "an absent annotation is not refused"
    );
}

/// The autoscaler then keeps to the minimum.
#[test]
fn a_max_scale_below_the_default_min_scale_is_accepted() {
    let mut config = ScalePolicyConfig::default();
    config.policy.min_scale = 5;
    let read = config.strict_policy(&annotated(&[("max-scale", "2")]), 0, "a").expect("valid");
    assert_eq!((read.min_scale, read.max_scale), (5, 2));
}

#[test]
fn an_annotation_that_a_config_map_forbids_is_ignored_alone() {
    let mut config = ScalePolicyConfig { max_scale_limit: 5, ..ScalePolicyConfig::default() };
    config.policy.max_scale = 5;
    let pairs = [("min-scale", "3"), ("max-scale", "10"), ("target", "10"), ("window", "90s")];
    let (read, problems) = config.lenient_policy(&annotated(&pairs), 1, "a");
    assert_eq!((read.min_scale, read.max_scale), (3, 5));
    assert_eq!((read.target_total, read.stable_window), (1.0, Duration::from_secs(90)));
    assert_eq!(
        crate::model::problem::problems_line(&problems),
        format!("expected 1 <= 10 <= 5: a.{AUTOSCALING_PREFIX}max-scale")
    );
    let strict =
        ScalePolicyConfig { allow_zero_initial_scale: false, ..ScalePolicyConfig::default() };
    let pairs = [("initial-scale", "0"), ("min-scale", "2")];
    let (read, problems) = strict.lenient_policy(&annotated(&pairs), 0, "a");
    assert_eq!((read.initial_scale, read.min_scale, problems.len()), (1, 2, 1));
}

#[test]
fn an_invalid_scale_leaves_the_default_in_force() {
    let mut config = ScalePolicyConfig::default();
    (config.policy.min_scale, config.policy.max_scale) = (1, 7);
    for (pairs, expected) in [
        (&[("max-scale", "x")][..], (1, 7)),
        (&[("max-scale", "-1"), ("min-scale", "2")], (2, 7)),
        (&[("min-scale", "x"), ("max-scale", "3")], (1, 3)),
        (&[("min-scale", "99999999999999999999")], (1, 7)),
        // Each is valid alone, so neither is known to be the wrong one.
        (&[("min-scale", "3"), ("max-scale", "2")], (1, 7)),
        (&[("min-scale", "0"), ("max-scale", "0")], (0, 0)),
    ] {
        let (read, _) = config.lenient_policy(&annotated(pairs), 0, "a");
        assert_eq!((read.min_scale, read.max_scale), expected, "{pairs:?}");
    }
}

/// Rule of knative/serving `pkg/reconciler/autoscaling/resources/target.go`.
#[test]
fn the_metric_rps_has_its_own_utilization() {
    let mut config = ScalePolicyConfig::default();
    config.policy.target_utilization = 0.5;
    let target_of = |pairs: &[(&str, &str)]| {
        let read = config.strict_policy(&annotated(pairs), 0, "a").expect("valid");
        (read.target_total, read.target_utilization)
    };
    assert_eq!(target_of(&[]), (100.0, 0.5));
    assert_eq!(target_of(&[("metric", "rps"), ("target", "200")]), (200.0, 0.7));
    let share = ("target-utilization-percentage", "80");
    assert_eq!(target_of(&[("metric", "rps"), share]), (200.0, 0.8));
}

/// Cases of knative/serving `pkg/reconciler/autoscaling/resources/target.go`.
#[test]
fn the_target_follows_metric_annotation_and_hard_limit() {
    let total = |pairs: &[(&str, &str)], limit| policy(pairs, limit).expect("valid").target_total;
    assert_eq!(total(&[], 0), 100.0);
    assert_eq!(total(&[], 8), 8.0);
    assert_eq!(total(&[("target", "5")], 8), 5.0);
    assert_eq!(total(&[("target", "9")], 8), 8.0);
    assert_eq!(total(&[("metric", "rps")], 8), 200.0);
    assert_eq!(total(&[("metric", "rps"), ("target", "9")], 8), 9.0);
}

#[test]
fn durations_are_those_of_go() {
    let delay = |text: &str| policy(&[("scale-down-delay", text)], 0).map(|it| it.scale_down_delay);
    for (text, seconds) in
        [("+30s", 30), ("30000000\u{3bc}s", 30), ("1000000\u{b5}s", 1), ("-0s", 0), (".5m", 30)]
    {
        assert_eq!(delay(text), Ok(Duration::from_secs(seconds)), "{text}");
    }
    for text in ["", "6", "s", "--1s", "+-1s", "1 s", "1d", "1.2.3s"] {
        let error = delay(text).unwrap_err();
        assert!(error.starts_with("invalid value: "), "{text}: {error}");
    }
}

#[test]
fn a_workload_wakes_to_the_number_of_its_user_and_grows_only_to_a_maximum() {
    let bound = |replicas: u32, pairs: &[(&str, &str)]| {
        let annotations = annotated(pairs);
        let config = ScalePolicyConfig { max_scale_limit: 50, ..ScalePolicyConfig::default() };
        let (mut policy, _) = config.lenient_policy(&annotations, 0, "at");
        let problems = bound_by_replicas(&mut policy, replicas, &annotations);
        assert_eq!((policy.initial_scale, policy.activation_scale), (replicas, replicas));
        (policy.max_scale, problems.len())
    };
    assert_eq!(bound(3, &[]), (3, 0));
    assert_eq!(bound(3, &[("max-scale", "2")]), (3, 0), "the user's own number is more");
    assert_eq!(bound(3, &[("maxScale", "9")]), (9, 0));
    assert_eq!(bound(3, &[("max-scale", "99")]), (3, 0), "the installation refuses it");
    assert_eq!(bound(3, &[("max-scale", "x")]), (3, 0));
    assert_eq!(bound(1, &[("min-scale", "4")]), (4, 0));
    let without_effect = [("initial-scale", "5"), ("activation-scale", "5")];
    assert_eq!(bound(3, &without_effect), (3, 2));
}
