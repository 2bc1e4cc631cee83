//! Pure: hints of the ready pods of each Revision, for the zones and nodes whose clients should use them.

use std::sync::Arc;

use common::wire::NamespacedName;
use smol_str::SmolStr;

use super::{RevisionPlanContext, readiness};
use crate::{
    decide::topology_hints::{self, EndpointPlace, HintRules},
    model::{
        cluster_state::{
            AppRevision, AppState, ClusterState, HintMode, HintedPod, ParsedTemplate, PodStage,
            RevisionPod, RevisionTopology,
        },
        knative::key,
    },
};

/// Returns the rule by which the pods of a Revision get hints: by the annotations of its app's Route, or by its own if
/// the Route has none about hints.
pub(crate) fn hint_mode(app: &AppState, template: &ParsedTemplate) -> HintMode {
    // Not key by key: a topology mode of the template would count before a traffic distribution of the Route.
    if key::HINTS.iter().any(|key| app.route_annotation(key).is_some()) {
        return app.route_hint_mode();
    }
    HintMode::from_annotations(|key| template.annotation(key))
}

/// Updates the hints of all ready pods.
pub(super) fn update_hints(
    app: &mut AppState,
    name: &NamespacedName,
    templates: &[Arc<ParsedTemplate>],
    cluster: &ClusterState,
) {
    for (at, template) in templates.iter().enumerate() {
        let revision = &app.revisions[at];
        // A Revision that is asleep has nothing to change.
        if revision.pods.is_empty() && revision.topology.is_none() {
            continue;
        }
        let context = RevisionPlanContext::without_time(cluster, &name.namespace, template);
        let topology = plan_topology(hint_mode(app, template), revision, &context);
        app.revisions[at].topology = topology.map(Box::new);
    }
}

/// Returns the hints of a Revision's ready pods; `None` without such a pod, or without a request for hints.
fn plan_topology(
    mode: HintMode,
    revision: &AppRevision,
    context: &RevisionPlanContext<'_>,
) -> Option<RevisionTopology> {
    let is_ready = |pod: &&RevisionPod| {
        pod.stage == PodStage::Serving && readiness::is_pod_ready(pod, context)
    };
    let mut ready: Vec<&RevisionPod> = revision.pods.iter().filter(is_ready).collect();
    if mode == HintMode::Off || ready.is_empty() {
        return None;
    }
    // Each replica observes the pods in another order, and a new pod should change few hints of others.
    ready.sort_by(|a, b| (a.created, &a.name).cmp(&(b.created, &b.name)));
    let place = |pod: &&RevisionPod| EndpointPlace {
        zone: context.zone(pod).into(),
        node: pod.kube_status.as_ref().map_or_else(SmolStr::default, |it| SmolStr::from(&*it.node)),
    };
    let places: Vec<EndpointPlace> = ready.iter().map(place).collect();
    let hinted = |(pod, place): (&&RevisionPod, EndpointPlace), hints| HintedPod {
        name: pod.name.clone(),
        zone: place.zone,
        hints,
    };
    let shares = &context.cluster.nodes.zone_shares;
    let assigned = topology_hints::assign_hints(HintRules { mode, shares }, &places);
    let refusal = assigned.as_ref().err().copied();
    let pods = ready.iter().zip(places).zip(assigned.unwrap_or_default());
    let mut pods: Vec<HintedPod> = pods.map(|(pod, hints)| hinted(pod, hints)).collect();
    pods.sort_by(|a, b| a.name.cmp(&b.name));
    // Without hints before there are none to keep, and the reason may be another one now.
    let before = revision.topology.as_deref().filter(|it| it.mode == mode && it.refusal.is_none());
    if let Some(before) = before
        && mode == HintMode::Proportional
        && is_same_place(&before.pods, &pods)
        && topology_hints::still_fit(before.pods.iter().map(|it| &it.hints.zone), shares)
    {
        return Some(before.clone());
    }
    Some(RevisionTopology { mode, pods, refusal })
}

/// Returns true if both lists have the same pods in the same zones.
fn is_same_place(before: &[HintedPod], now: &[HintedPod]) -> bool {
    let is_same = |(a, b): (&HintedPod, &HintedPod)| a.name == b.name && a.zone == b.zone;
    before.len() == now.len() && before.iter().zip(now).all(is_same)
}
