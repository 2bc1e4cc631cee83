//! Pure: scaled Services as the API server holds them: Services of users, with their workloads and PodAutoscalers.
//!
//! Of the objects of users, the metadata and these fields are read:
//!
//! | kind | fields |
//! |---|---|
//! | Service | of the spec: `clusterIPs`, `externalName`, `internalTrafficPolicy`, `ports`, `selector`, `type`, |
//! | | `sessionAffinity`, `sessionAffinityConfig`, `trafficDistribution` |
//! | Deployment, StatefulSet | of the spec: `replicas`, `ordinals`; of its template labels, `hostNetwork`, containers |
//! | HorizontalPodAutoscaler | of the spec: `scaleTargetRef`, `minReplicas` |
//! | Pod | as of Revisions, and of the spec `hostNetwork` and containers |
//! | PodAutoscaler | `status.conditions` |
//!
//! Of containers and init containers: `name`, `image`, `ports`, `readinessProbe`, `restartPolicy`, `startupProbe`.

use serde_json::Value;

use crate::model::{knative::key, object::json::label};

/// Returns true for the PodAutoscaler of a scaled Service, which the state machine reads.
pub fn is_scaled_autoscaler(object: &Value) -> bool {
    label(object, key::SCALED_SERVICE).is_some()
}
