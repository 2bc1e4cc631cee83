//! Pure: settings of a Revision because of which none of its pods can stand by.

use common::wire::ScalePolicy;
use k8s_openapi::api::core::v1::PodSpec;

use crate::model::{scale_policy::AutoscalerClass, standby_policy::has_exec_probe};

/// Setting because of which no pod of a Revision stands by, although its policy asks for some.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StandbyObstacle {
    /// A probe of the kubelet runs a command in a container.
    ExecProbe,
    /// Another autoscaler than Rouse's scales the Revision.
    ForeignAutoscaler,
    /// The Revision always keeps as many running pods.
    MinScale,
    /// Scale to zero is switched off, so the Revision never sleeps.
    NoScaleToZero,
}

impl StandbyObstacle {
    /// Returns the first obstacle to `pods` pods on standby, above 0, of a Revision with these settings.
    pub fn find(
        pods: u32,
        pod: &PodSpec,
        class: AutoscalerClass,
        policy: &ScalePolicy,
    ) -> Option<Self> {
        if class != AutoscalerClass::Kpa {
            Some(Self::ForeignAutoscaler)
        } else if !policy.scale_to_zero {
            Some(Self::NoScaleToZero)
        } else if policy.min_scale >= pods {
            Some(Self::MinScale)
        } else {
            has_exec_probe(pod).then_some(Self::ExecProbe)
        }
    }

    /// Returns the obstacle in words for users.
    pub fn message(self) -> &'static str {
        match self {
            Self::ExecProbe => {
                "a probe runs a command, which the kubelet could not run in a frozen pod"
            }
            Self::ForeignAutoscaler => "another autoscaler sets the number of pods",
            Self::MinScale => "min-scale keeps at least as many pods running",
            Self::NoScaleToZero => "enable-scale-to-zero of config-autoscaler is false",
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_setting_that_keeps_pods_from_standing_by_is_found() {
        let pod = |probe: &str| -> PodSpec {
            let probe = match probe {
                "exec" => json!({"exec": {"command": ["true"]}}),
                _ => json!({"httpGet": {"port": 8080}}),
            };
            let container = json!({"name": "a", "livenessProbe": probe});
            serde_json::from_value(json!({"containers": [container]})).expect("a pod")
        };
        let find = |pods, probe, class, min_scale, scale_to_zero| {
            let policy = ScalePolicy { min_scale, scale_to_zero, ..ScalePolicy::default() };
            StandbyObstacle::find(pods, &pod(probe), class, &policy)
        };
        let kpa = AutoscalerClass::Kpa;
        assert_eq!(find(1, "http", kpa, 0, true), None);
        assert_eq!(find(2, "http", kpa, 1, true), None, "one more than runs");
        assert_eq!(find(1, "exec", kpa, 0, true), Some(StandbyObstacle::ExecProbe));
        assert_eq!(find(1, "http", kpa, 1, true), Some(StandbyObstacle::MinScale));
        assert_eq!(find(1, "http", kpa, 0, false), Some(StandbyObstacle::NoScaleToZero));
        for class in [AutoscalerClass::Hpa, AutoscalerClass::Foreign] {
            let found = find(1, "http", class, 0, true);
            assert_eq!(found, Some(StandbyObstacle::ForeignAutoscaler), "{class:?}");
        }
    }
}
