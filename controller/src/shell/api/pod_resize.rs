//! Pure: a pod as the API server holds it, and the resource requests that it should have → the patches that resize it.
//!
//! Before the original requests are reduced, they are noted in an annotation of the pod. So any later leader restores
//! exactly these, also if a webhook or a LimitRange had set them.
//!
//! Only requests change. With a lower limit, a thawed pod would be throttled or killed before the limit is restored.
//! Kubernetes' `pkg/apis/core/validation` (`ValidatePodResize`) and `pkg/kubelet/allocation` state the resizes that API
//! server and kubelet accept.

use std::collections::BTreeMap;

use common::quantity;
use serde_json::{Map, Value, json};

use crate::model::{
    knative::key::ORIGINAL_REQUESTS,
    object::{PodRequests, RESIZE_UNSUPPORTED, WriteError, json as fields},
};

/// CPU request of each container of a frozen pod, which uses no CPU. Kubernetes treats less as 1m.
const REDUCED_CPU: &str = "1m";
/// Bytes of a MiB.
const MIB: u128 = 1 << 20;
/// Resources whose requests are reduced.
const RESOURCES: [&str; 2] = ["cpu", "memory"];

/// Requests of containers: quantities by container, then by resource.
type ContainerRequests = BTreeMap<String, BTreeMap<String, String>>;

/// Patches that resize a pod, in the order in which they are to be sent. If an attempt ends between two of them, the
/// next attempt plans and sends what is missing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ResizePatches {
    /// Merge patch of the pod that notes its original requests; `None`: they are noted, or nothing is reduced.
    pub note: Option<Value>,
    /// Strategic merge patch of the subresource `resize`; `None`: the pod has the requests already.
    pub resize: Option<Value>,
    /// Merge patch of the pod that removes the note; `None`: the pod has no note, or it is still needed.
    pub release: Option<Value>,
}

/// Returns the patches that give a pod the requests that it should have.
///
/// # Errors
///
/// Returns an error if the requests of this pod cannot be reduced at all ([`RESIZE_UNSUPPORTED`]), or if its note of
/// them is not readable.
pub fn plan_resize(pod: &Value, requests: PodRequests) -> Result<ResizePatches, WriteError> {
    // The requests of a pod that ends are given back with it.
    if fields::is_terminating(pod) {
        return Ok(ResizePatches::default());
    }
    let noted = noted_requests(pod)?;
    match (requests, noted) {
        (PodRequests::Reduced { memory_mib }, noted) => reduce(pod, noted, memory_mib),
        (PodRequests::Original, Some(noted)) => Ok(ResizePatches {
            note: None,
            resize: resize_patch(pod, &noted),
            release: Some(annotation_patch(pod, Value::Null)),
        }),
        // The requests were never reduced, or they have been restored.
        (PodRequests::Original, None) => Ok(ResizePatches::default()),
    }
}

/// Returns the patches that reduce the requests of a pod; `noted` are its original ones, if they were reduced before.
fn reduce(
    pod: &Value,
    noted: Option<ContainerRequests>,
    memory_mib: Option<u64>,
) -> Result<ResizePatches, WriteError> {
    if let Some(reason) = unsupported_reason(pod) {
        let message = format!("The requests of the pod stay while it is frozen: {reason}");
        return Err(WriteError { reason: RESIZE_UNSUPPORTED, message });
    }
    let is_noted = noted.is_some();
    let original = noted.unwrap_or_else(|| present_requests(pod));
    let Some(resize) = resize_patch(pod, &reduced_requests(&original, memory_mib)) else {
        return Ok(ResizePatches::default());
    };
    // With the pod's version in it, the API server refuses the note if the pod has changed since it was read. So the
    // note has the requests that the pod really had.
    let note = (!is_noted).then(|| {
        let mut patch = annotation_patch(pod, json!(json!(original).to_string()));
        patch["metadata"]["resourceVersion"] = pod["metadata"]["resourceVersion"].clone();
        patch
    });
    Ok(ResizePatches { note, resize: Some(resize), release: None })
}

/// Returns the reason for which no resize can reduce the requests of a pod; `None`: there is none.
fn unsupported_reason(pod: &Value) -> Option<&'static str> {
    let mut containers = fields::array_items(&pod["status"]["containerStatuses"]);
    // Only a kubelet that can resize pods states the resources in force. Another one may restart the containers
    // instead.
    let has_no_resources =
        |it: &Value| it["state"]["running"].is_object() && !it["resources"].is_object();
    if pod["status"]["qosClass"] == "Guaranteed" {
        Some("it is of the QoS class Guaranteed, which a resize may not change")
    } else if pod["spec"]["resources"].as_object().is_some_and(|it| !it.is_empty()) {
        Some("it has resources of the whole pod (spec.resources)")
    } else if containers.any(has_no_resources) {
        Some("the kubelet of its node does not resize pods")
    } else {
        None
    }
}

/// Returns the requests that a resize may change without a restart, as the pod has them now.
fn present_requests(pod: &Value) -> ContainerRequests {
    let mut all = ContainerRequests::new();
    for (_, container) in resizable_containers(pod) {
        let Some(name) = container["name"].as_str() else { continue };
        let requests = RESOURCES.into_iter().filter(|it| !restarts_for(container, it));
        let requests = requests.filter_map(|resource| {
            let amount = container["resources"]["requests"][resource].as_str()?;
            Some((resource.to_owned(), amount.to_owned()))
        });
        let requests: BTreeMap<String, String> = requests.collect();
        if !requests.is_empty() {
            all.insert(name.to_owned(), requests);
        }
    }
    all
}

/// Iterates over the containers that run as long as the pod, each with the field of the pod's spec that lists it. A
/// resize may not change init containers that end.
fn resizable_containers(pod: &Value) -> impl Iterator<Item = (&'static str, &Value)> {
    let sidecars = fields::array_items(&pod["spec"]["initContainers"])
        .filter(|it| it["restartPolicy"] == "Always")
        .map(|it| ("initContainers", it));
    let containers = fields::array_items(&pod["spec"]["containers"]).map(|it| ("containers", it));
    sidecars.chain(containers)
}

/// Returns true if the kubelet restarts the container when this resource of it changes.
fn restarts_for(container: &Value, resource: &str) -> bool {
    fields::array_items(&container["resizePolicy"])
        .any(|it| it["resourceName"] == resource && it["restartPolicy"] == "RestartContainer")
}

/// Returns the requests of a frozen pod that holds `memory_mib`; `None`: its memory requests stay. No request becomes
/// larger than it was.
///
/// Memory is divided among the containers in proportion to their requests, since only the memory of the whole pod is
/// known.
fn reduced_requests(original: &ContainerRequests, memory_mib: Option<u64>) -> ContainerRequests {
    let memory_of = |requests: &BTreeMap<String, String>| {
        requests.get("memory").and_then(|it| quantity::parse_units(it)).map_or(0, u128::from)
    };
    let total: u128 = original.values().map(memory_of).sum();
    let mut reduced = original.clone();
    for requests in reduced.values_mut() {
        let own = memory_of(requests);
        if let (Some(held), Some(amount)) = (memory_mib, requests.get_mut("memory")) {
            // A request of zero counts as none, and without requests the QoS class would change.
            let share_mib = (u128::from(held) * own).div_ceil(total.max(1)).max(1);
            if share_mib.saturating_mul(MIB) < own {
                *amount = format!("{share_mib}Mi");
            }
        }
        if let Some(amount) = requests.get_mut("cpu")
            && quantity::parse_milli(amount).is_some_and(|it| it > 1)
        {
            *amount = REDUCED_CPU.to_owned();
        }
    }
    reduced
}

/// Returns the patch of the subresource `resize` that gives the pod these requests; `None`: it has them.
fn resize_patch(pod: &Value, requests: &ContainerRequests) -> Option<Value> {
    let mut spec: Map<String, Value> = Map::new();
    for (list, container) in resizable_containers(pod) {
        let Some(name) = container["name"].as_str() else { continue };
        let Some(wanted) = requests.get(name) else { continue };
        let present = &container["resources"]["requests"];
        let differs = |(resource, amount): &(&String, &String)| {
            // The API server may write the same amount in another way.
            let parse = quantity::parse_milli;
            present[resource.as_str()].as_str().and_then(parse) != parse(amount)
        };
        let changed: BTreeMap<&String, &String> = wanted.iter().filter(differs).collect();
        if changed.is_empty() {
            continue;
        }
        let patch = json!({"name": name, "resources": {"requests": changed}});
        if let Value::Array(all) = spec.entry(list).or_insert_with(|| json!([])) {
            all.push(patch);
        }
    }
    // The UID keeps the patch from another pod that has got the name since.
    (!spec.is_empty()).then(|| json!({"metadata": {"uid": pod["metadata"]["uid"]}, "spec": spec}))
}

/// Returns the merge patch that sets the note of a pod's original requests, or removes it if `note` is null.
fn annotation_patch(pod: &Value, note: Value) -> Value {
    let mut patch = json!({"metadata": {"uid": pod["metadata"]["uid"], "annotations": {}}});
    patch["metadata"]["annotations"][ORIGINAL_REQUESTS] = note;
    patch
}

/// Returns the original requests that are noted on a pod; `None`: none are.
fn noted_requests(pod: &Value) -> Result<Option<ContainerRequests>, WriteError> {
    let Some(note) = fields::annotation(pod, ORIGINAL_REQUESTS) else { return Ok(None) };
    let parsed: Option<ContainerRequests> = serde_json::from_str(note).ok();
    let is_readable = |it: &ContainerRequests| {
        it.values().flatten().all(|(resource, amount)| {
            RESOURCES.contains(&resource.as_str()) && quantity::parse_milli(amount).is_some()
        })
    };
    // Of a note that is readable in part, the pod would keep some reduced requests without limit.
    match parsed.filter(is_readable) {
        Some(noted) => Ok(Some(noted)),
        None => {
            let message = format!(
                "The annotation {ORIGINAL_REQUESTS} is not readable, so the requests of the pod cannot be restored: delete the pod"
            );
            Err(WriteError { reason: "ResizeNoteUnreadable", message })
        }
    }
}

#[cfg(test)]
mod tests;
