//! Pure: statuses of PodAutoscaler and ServerlessService, from which tools read a Revision's scale
//! (knative/serving `pkg/apis/autoscaling/v1alpha1/pa_lifecycle.go`, `pkg/reconciler/serverlessservice`).

use common::wire::{Name, Path};
use serde_json::{Value, json};

use crate::{
    children::{scaling::Mode, services},
    policy::Class,
    render,
    world::{Kind, Revision, Stamp, Truth, Why, World},
};

/// Smallest number of activators that Knative assigns to a Revision.
const ACTIVATORS: i32 = 2;

/// Returns one condition; with `info` it has the severity of mere information.
fn condition(name: &str, truth: &Truth, since: Stamp, info: bool) -> Value {
    let (status, why) = match truth {
        Truth::True(why) => ("True", why.clone()),
        Truth::Unknown(why) => ("Unknown", why.clone()),
        Truth::False(why) => ("False", Some(why.clone())),
    };
    let mut out = json!({"type": name, "status": status, "lastTransitionTime": since.rfc3339()});
    if let Some(Why { reason, message }) = why {
        for (field, text) in [("reason", reason), ("message", message)] {
            if !text.is_empty() {
                out[field] = json!(text);
            }
        }
    }
    if info {
        out["severity"] = json!("Info");
    }
    out
}

fn since(revision: &Revision, kind: Kind) -> (Stamp, Truth) {
    let found = revision.conditions.iter().find(|(have, _, _)| *have == kind);
    found.map_or((revision.meta.created, Truth::Unknown(None)), |(_, at, truth)| (at, truth))
}

/// Returns the status of a Revision's PodAutoscaler.
pub(super) fn autoscaler(revision: &Revision, namespace: &str, world: &World) -> Value {
    let (at, active) = since(revision, Kind::RevisionActive);
    let initialized = match revision.reached {
        true => Truth::True(None),
        false => Truth::Unknown(None),
    };
    let (populated_at, populated) = populated(revision);
    // Knative's rule: the first false condition, else the first unknown one, else true.
    let ready = [&active, &initialized, &populated];
    let worst = ready.iter().find(|it| matches!(it, Truth::False(_)));
    let worst = worst.or_else(|| ready.iter().find(|it| matches!(it, Truth::Unknown(_))));
    let ready = worst.map_or(Truth::True(None), |it| (**it).clone());
    let decision = render::decision(world, &Name::new(namespace, &*revision.name));
    let mut status = json!({
        "serviceName": &*revision.name,
        "metricsServiceName": services::private_name(&revision.name),
        "desiredScale": revision.desired,
        "actualScale": revision.actual,
        "conditions": [
            condition("Active", &active, at, false),
            condition("Ready", &ready, at, false),
            condition("SKSReady", &populated, populated_at, false),
            condition("ScaleTargetInitialized", &initialized, revision.meta.created, false),
        ],
    });
    if !decision.is_empty() {
        status["annotations"] = json!(decision);
    }
    status
}

/// Returns the mode of new connections: `Serve` (direct) once a pod is ready and nothing requires activators.
/// `may_serve` is false for reasons outside the autoscaler: a hard limit, a split of traffic, the user's choice.
pub(super) fn mode(revision: &Revision, class: Class, may_serve: bool) -> (Mode, i32) {
    if class != Class::Kpa {
        // Direct to the pods; without pods through all activators.
        return (Mode::Serve, 0);
    }
    let direct = revision.decided.map_or(Path::Activator, |it| it.path) == Path::Direct;
    let serves = direct && may_serve && revision.actual > 0;
    (if serves { Mode::Serve } else { Mode::Proxy }, ACTIVATORS)
}

fn populated(revision: &Revision) -> (Stamp, Truth) {
    let (at, _) = since(revision, Kind::RevisionActive);
    let none = || Why::new("NoHealthyBackends", "SKS has no healthy backends");
    (at, if revision.actual > 0 { Truth::True(None) } else { Truth::Unknown(Some(none())) })
}

/// Returns the status of a Revision's ServerlessService.
pub(super) fn serverless(revision: &Revision, mode: Mode) -> Value {
    let (at, populated) = populated(revision);
    let activators = match mode {
        Mode::Proxy => Truth::True(None),
        Mode::Serve => Truth::False(Why::new("", "")),
    };
    json!({
        "serviceName": &*revision.name,
        "privateServiceName": services::private_name(&revision.name),
        "conditions": [
            condition("ActivatorEndpointsPopulated", &activators, at, true),
            condition("EndpointsPopulated", &populated, at, false),
            condition("Ready", &populated, at, false),
        ],
    })
}
