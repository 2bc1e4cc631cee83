//! Pure: hints of the ready pods of each Revision, for the zones and nodes whose clients should use them.

use std::sync::Arc;

use common::wire::NamespacedName;
use smol_str::SmolStr;

use super::{RevisionPlanContext, scale};
use crate::{
    decide::topology_hints::{self, EndpointPlace, HintRules},
    model::cluster_state::{
        AppRevision, AppState, ClusterState, HintMode, HintedPod, ParsedTemplate, PodStage,
        RevisionPod, RevisionTopology, UnixMillis,
    },
};

/// Returns the rule by which the pods of a Revision get hints: by the annotations of its app's Route, else by its own.
pub(crate) fn hint_mode(app: &AppState, template: &ParsedTemplate) -> HintMode {
    HintMode::from_annotations(|key| app.route_annotation(key).or_else(|| template.annotation(key)))
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
        if revision.pods.is_empty() && revision.topology.is_none() {
            continue;
        }
        let context = RevisionPlanContext {
            cluster,
            namespace: &name.namespace,
            template,
            now: UnixMillis::default(),
        };
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
    let is_ready =
        |pod: &&RevisionPod| pod.stage == PodStage::Serving && scale::is_pod_ready(pod, context);
    let mut ready: Vec<&RevisionPod> = revision.pods.iter().filter(is_ready).collect();
    if mode == HintMode::Off || ready.is_empty() {
        return None;
    }
    // Each replica observes the pods in another order, and a new pod should change few hints of others.
    ready.sort_by(|a, b| (a.created, &a.name).cmp(&(b.created, &b.name)));
    let shares = &context.cluster.nodes.zone_shares;
    let zones: Vec<String> = ready.iter().map(|pod| context.zone(pod)).collect();
    if let Some(before) = &revision.topology
        && before.mode == mode
        && mode == HintMode::Proportional
        && has_same_pods(before, &ready, &zones)
        && topology_hints::still_fit(before.pods.iter().map(|it| &it.hints.zone), shares)
    {
        return Some(RevisionTopology::clone(before));
    }
    let place = |(pod, zone): (&&RevisionPod, &String)| EndpointPlace {
        zone: SmolStr::from(zone.as_str()),
        node: pod.kube_status.as_ref().map_or_else(SmolStr::default, |it| SmolStr::from(&*it.node)),
    };
    let places: Vec<EndpointPlace> = ready.iter().zip(&zones).map(place).collect();
    let assigned = topology_hints::assign_hints(HintRules { mode, shares }, &places);
    let refusal = assigned.as_ref().err().copied();
    let hinted = ready.iter().zip(places).zip(assigned.unwrap_or_default());
    let pods = hinted.map(|((pod, place), hints)| HintedPod {
        uid: pod.uid.clone(),
        zone: place.zone,
        hints,
    });
    Some(RevisionTopology { mode, pods: pods.collect(), refusal })
}

/// Returns true if hints are for exactly these pods in these zones.
fn has_same_pods(before: &RevisionTopology, ready: &[&RevisionPod], zones: &[String]) -> bool {
    let is_same = |(hinted, (pod, zone)): (&HintedPod, (&&RevisionPod, &String))| {
        hinted.uid == pod.uid && hinted.zone.as_str() == zone.as_str()
    };
    before.pods.len() == ready.len()
        && before.pods.iter().zip(ready.iter().zip(zones)).all(is_same)
}
