//! Pure: templates in use, parsed and checked once.

use std::{
    cell::RefCell,
    collections::{BTreeMap, HashMap},
    num::NonZeroU16,
    sync::Arc,
    time::Duration,
};

use common::wire::{AppProtocol, ScalePolicy};

use super::{AppRevision, ClusterState, PodLayout};
use crate::model::{
    go_values::parse_unsigned_duration,
    knative::{RevisionTemplate, key, user_container},
    problem::{self, Problem},
    scale_policy::{self, AutoscalerClass},
    standby_policy::{StandbyConfig, StandbyPolicy},
};

/// Port of a container that declares none (knative/serving `networking.DefaultUserPort`).
const DEFAULT_PORT: NonZeroU16 = NonZeroU16::new(8080).expect("not zero");

/// Templates in use, parsed: equal templates share memory and are parsed once.
#[derive(Clone, Debug, Default)]
pub struct TemplateCache(RefCell<HashMap<Arc<str>, Arc<ParsedTemplate>>>);

impl TemplateCache {
    /// Number of templates kept in any case, at a few KB each; beyond it the cache is cleared and filled again.
    const MIN_CAPACITY: usize = 256;

    /// Returns the stored template of equal text, or the given one.
    pub fn intern(&self, template: &Arc<str>) -> Arc<str> {
        let cache = self.0.borrow();
        Arc::clone(cache.get_key_value(template).map_or(template, |(stored, _)| stored))
    }

    /// Returns a template, parsed. The cache is cleared when it holds `pod_count` templates, and at least
    /// [`MIN_CAPACITY`](Self::MIN_CAPACITY). Sleeping services are seldom planned, but templates of those that run
    /// must not be parsed again for each report about a pod.
    fn get_or_parse(
        &self,
        template: &Arc<str>,
        pod_count: usize,
        parse: impl FnOnce() -> ParsedTemplate,
    ) -> Arc<ParsedTemplate> {
        let mut cache = self.0.borrow_mut();
        if let Some(parsed) = cache.get(template) {
            return Arc::clone(parsed);
        }
        // Clearing is rare, and costs less than the bookkeeping of a least-recently-used order.
        if cache.len() >= Self::MIN_CAPACITY.max(pod_count) {
            cache.clear();
        }
        let parsed = Arc::new(parse());
        cache.insert(Arc::clone(template), Arc::clone(&parsed));
        parsed
    }
}

/// Template of a Revision, parsed and checked.
#[derive(Clone, Debug)]
pub struct ParsedTemplate {
    /// The template itself, with labels, annotations and spec.
    pub raw: RevisionTemplate,
    /// Scaling policy from annotations and `config-autoscaler`.
    pub policy: Arc<ScalePolicy>,
    /// Policy of standby from annotations and `config-autoscaler`. Plans also read the default of the namespace.
    pub standby: StandbyPolicy,
    /// Autoscaler class: the autoscaler that scales the Revision.
    pub class: AutoscalerClass,
    /// Broken rules of annotations that a ConfigMap no longer allows, in one line; these annotations are not in force.
    pub ignored_annotations: Option<Box<str>>,
    /// Requests that a pod may have at once (hard limit); 0: no limit.
    pub container_concurrency: u32,
    /// Time limit of a whole request, `timeoutSeconds`.
    pub timeout: Duration,
    /// Index of the serving container in the pod's list.
    pub serving_index: usize,
    /// Port of the serving container.
    pub port: NonZeroU16,
    /// Protocol that the serving container speaks.
    pub protocol: AppProtocol,
}

impl ParsedTemplate {
    /// Returns the parsed template of a Revision, which was checked when it was applied.
    pub fn of_revision(revision: &AppRevision, cluster: &ClusterState) -> Arc<Self> {
        let pod_count = cluster.pods.statuses.len();
        cluster.template_cache.get_or_parse(&revision.template, pod_count, || {
            Self::parse(&revision.template, cluster)
        })
    }

    /// Returns the parsed template of a pod whose containers may differ from those of its Revision's other pods.
    pub fn of_layout(layout: &PodLayout, cluster: &ClusterState) -> Arc<Self> {
        let pod_count = cluster.pods.statuses.len();
        cluster
            .template_cache
            .get_or_parse(&layout.template, pod_count, || Self::parse(&layout.template, cluster))
    }

    /// Parses a template by the settings in force. A value that cannot be read counts as its default, and is reported.
    fn parse(text: &str, cluster: &ClusterState) -> Self {
        let raw: RevisionTemplate = serde_json::from_str(text).unwrap_or_default();
        let limit = raw.spec.container_concurrency.unwrap_or(0);
        let container_concurrency = u32::try_from(limit).unwrap_or(0);
        let none = BTreeMap::new();
        let annotations = raw.metadata.annotations.as_ref().unwrap_or(&none);
        let config = &cluster.settings.scale_policy;
        let (mut policy, mut problems) =
            config.lenient_policy(annotations, container_concurrency, "metadata.annotations");
        if let Some(replicas) = user_replicas(&raw) {
            problems.extend(scale_policy::bound_by_replicas(&mut policy, replicas, annotations));
            // A HorizontalPodAutoscaler keeps its number of pods, so a number that has to fall step by step would never
            // reach zero. And a workload that does not grow has either the number of its user or none.
            if annotations.contains_key(key::HAS_HPA) || policy.max_scale == replicas {
                policy.max_scale_down_rate = scale_policy::UNBOUNDED_RATE;
            }
        }
        let (standby, refused) = read_standby(&raw, annotations, &config.standby);
        problems.extend(refused);
        let ignored_annotations =
            (!problems.is_empty()).then(|| problem::problems_line(&problems).into());
        // This annotation belongs to the group `serving.knative.dev`, so `lenient_policy` has not read it.
        let deadline = key::PROGRESS_DEADLINE.iter().find_map(|name| annotations.get(*name));
        policy.progress_deadline = deadline
            .and_then(|text| parse_unsigned_duration(text))
            .unwrap_or(policy.progress_deadline);
        let containers = &raw.spec.pod.containers;
        let serving_index = user_container::serving_index(containers);
        let port = containers.get(serving_index).and_then(|it| it.ports.as_ref()?.first());
        let number = port.and_then(|port| u16::try_from(port.container_port).ok());
        let timeout = raw.spec.timeout_seconds.and_then(|it| u64::try_from(it).ok());
        Self {
            policy: Arc::new(policy),
            standby,
            class: AutoscalerClass::from_annotations(annotations),
            ignored_annotations,
            container_concurrency,
            timeout: Duration::from_secs(timeout.filter(|it| *it > 0).unwrap_or(300)),
            serving_index,
            port: number.and_then(NonZeroU16::new).unwrap_or(DEFAULT_PORT),
            protocol: user_container::read_protocol(annotations, containers),
            raw,
        }
    }

    /// Returns an annotation of the template.
    pub fn annotation(&self, name: &str) -> Option<&str> {
        self.raw.metadata.annotations.as_ref()?.get(name).map(String::as_str)
    }
}

/// Returns the policy of standby, and a problem for each annotation that is not in force.
fn read_standby(
    template: &RevisionTemplate,
    annotations: &BTreeMap<String, String>,
    config: &StandbyConfig,
) -> (StandbyPolicy, Vec<Problem>) {
    const AT: &str = "metadata.annotations";
    if !is_of_scaled_service(template) {
        return config.lenient_policy(annotations, AT);
    }
    // The number of a workload's pods is its user's, and 0 while it sleeps.
    let names = [key::STANDBY, key::STANDBY_MEMORY, key::STANDBY_TTL].into_iter();
    let without_effect = |name: &str| {
        Problem::new(format!("{AT}.{name}"), "only pods of a Knative Service stand by")
    };
    let refused = names.filter(|it| annotations.contains_key(*it)).map(without_effect);
    (StandbyPolicy::default(), refused.collect())
}

/// Returns the number of pods that the user of a scaled Service wants; `None` for the template of any other Revision.
fn user_replicas(template: &RevisionTemplate) -> Option<u32> {
    let annotations = template.metadata.annotations.as_ref();
    let annotations = annotations.filter(|_| is_of_scaled_service(template))?;
    annotations.get(key::USER_REPLICAS)?.parse().ok()
}

/// Returns true for the template of a Revision that stands for the workload of a scaled Service, or of one of its pods.
fn is_of_scaled_service(template: &RevisionTemplate) -> bool {
    // No template of a user has this text there: the rules of the field refuse it.
    template.metadata.generate_name.as_deref() == Some(key::SCALED_SERVICE)
}
