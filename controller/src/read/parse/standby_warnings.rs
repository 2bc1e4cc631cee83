//! Pure: warnings about annotations of standby that have no effect beside the other settings of a template.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::PodSpec;

use crate::model::{
    knative::key,
    problem::Problem,
    scale_policy::{AutoscalerClass, ScalePolicyConfig},
    standby_obstacle::StandbyObstacle,
    standby_policy::parse_pods,
};

/// Warns of standby that a template asks for and does not get. `at` is the path of the annotations.
pub(super) fn warn_standby(
    annotations: &BTreeMap<String, String>,
    pod: &PodSpec,
    config: &ScalePolicyConfig,
    at: &str,
    warnings: &mut Vec<Problem>,
) {
    // Without a number the default of the namespace or of the installation counts, which may change.
    let Some(Ok(pods)) = annotations.get(key::STANDBY).map(|text| parse_pods(text.trim())) else {
        return;
    };
    let mut warn = |name: &str, message: String| {
        warnings.push(Problem::new(format!("{at}.{name}"), message));
    };
    if pods == 0 {
        for name in [key::STANDBY_MEMORY, key::STANDBY_TTL] {
            if annotations.contains_key(name) {
                warn(name, format!("{name} has no effect: no pod stands by"));
            }
        }
        return;
    }
    // Bounds of the scale do not depend on the hard limit.
    let (policy, _) = config.lenient_policy(annotations, 0, at);
    let class = AutoscalerClass::from_annotations(annotations);
    let name = key::STANDBY;
    if let Some(obstacle) = StandbyObstacle::find(pods, pod, class, &policy) {
        warn(name, format!("{name} has no effect: {}", obstacle.message()));
    } else if (1..pods).contains(&policy.max_scale) {
        let max = policy.max_scale;
        warn(name, format!("{name}={pods} is more than max-scale={max}, which holds for all pods"));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn warnings(pairs: &[(&str, &str)], probe: &str) -> Vec<String> {
        let annotations =
            pairs.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect();
        let probe = match probe {
            "exec" => json!({"exec": {"command": ["true"]}}),
            _ => json!({"tcpSocket": {"port": 8080}}),
        };
        let container = json!({"name": "a", "readinessProbe": probe});
        let pod = serde_json::from_value(json!({"containers": [container]})).expect("a pod");
        let mut warnings = Vec::new();
        warn_standby(&annotations, &pod, &ScalePolicyConfig::default(), "a", &mut warnings);
        warnings.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn standby_that_another_setting_excludes_is_warned_of() {
        let one = (key::STANDBY, "1");
        assert_eq!(warnings(&[], "exec"), [""; 0], "none is asked for");
        assert_eq!(warnings(&[one], "tcp"), [""; 0]);
        let without_effect = |reason: &str| {
            [format!("rouse.dev/standby has no effect: {reason}: a.rouse.dev/standby")]
        };
        assert_eq!(
            warnings(&[one], "exec"),
            without_effect(
                "a probe runs a command, which the kubelet could not run in a frozen pod"
            )
        );
        let min = ("autoscaling.knative.dev/min-scale", "1");
        assert_eq!(
            warnings(&[one, min], "tcp"),
            without_effect("min-scale keeps at least as many pods running")
        );
        let class = ("autoscaling.knative.dev/class", "hpa.autoscaling.knative.dev");
        assert_eq!(
            warnings(&[one, class], "tcp"),
            without_effect("another autoscaler sets the number of pods")
        );
    }

    #[test]
    fn a_maximum_below_the_number_is_warned_of() {
        let (three, max) = ((key::STANDBY, "3"), "autoscaling.knative.dev/max-scale");
        let message = "rouse.dev/standby=3 is more than max-scale=2, which holds for all pods: \
                       a.rouse.dev/standby";
        assert_eq!(warnings(&[three, (max, "2")], "tcp"), [message]);
        for enough in ["0", "3"] {
            assert_eq!(warnings(&[three, (max, enough)], "tcp"), [""; 0], "{enough}");
        }
    }

    #[test]
    fn settings_of_no_pod_are_warned_of() {
        let none = (key::STANDBY, "0");
        let (memory, ttl) = ((key::STANDBY_MEMORY, "reclaim"), (key::STANDBY_TTL, "1h"));
        assert_eq!(
            warnings(&[none, memory, ttl], "tcp"),
            [
                "rouse.dev/standby-memory has no effect: no pod stands by: a.rouse.dev/standby-memory",
                "rouse.dev/standby-ttl has no effect: no pod stands by: a.rouse.dev/standby-ttl",
            ]
        );
        // The namespace may have a default.
        assert_eq!(warnings(&[memory, ttl], "tcp"), [""; 0]);
    }
}
