//! Resizes of pods, as the writer of the leader sends them and the API server stores them.

use serde_json::{Value, json};

use super::FakeApiServer;
use crate::{
    decide::machine::ControllerEvent,
    model::{
        knative::key::ORIGINAL_REQUESTS,
        object::{ObjectPartKey, PodRequests},
    },
    shell::api::pod_resize::{ResizePatches, plan_resize},
};

impl FakeApiServer {
    /// Gives the pod with this UID its requests, and returns the observations that follow. A resize fails while
    /// `resize_refusal` is set.
    pub(super) fn resize(
        &mut self,
        key: &ObjectPartKey,
        uid: &str,
        requests: PodRequests,
    ) -> Vec<ControllerEvent> {
        let pod = self.objects.get_mut(&(key.resource, key.name.clone()));
        let Some(pod) = pod.filter(|it| it["metadata"]["uid"] == *uid) else { return Vec::new() };
        let planned = plan_resize(pod, requests).and_then(|patches| {
            let refusal = self.resize_refusal.clone().filter(|_| patches.resize.is_some());
            refusal.map_or(Ok(patches), Err)
        });
        let mut events = Vec::new();
        match planned {
            Err(error) => {
                self.failed_writes.insert(key.clone());
                let (key, error) = (key.clone(), Some(error));
                events.push(ControllerEvent::WriteErrorChanged { key, error });
            }
            Ok(patches) => {
                if patches != ResizePatches::default() {
                    self.writes += 1;
                    apply_patches(pod, &patches);
                    events.push(ControllerEvent::ObjectObserved {
                        resource: key.resource,
                        name: key.name.clone(),
                        object: Some(Box::new(pod.clone())),
                    });
                }
                let ended = self.failed_writes.take(key);
                let ended =
                    ended.map(|key| ControllerEvent::WriteErrorChanged { key, error: None });
                events.extend(ended);
            }
        }
        events
    }
}

/// Applies the patches to a pod. Only a change of the requests raises the pod's generation.
fn apply_patches(pod: &mut Value, patches: &ResizePatches) {
    if let Some(note) = &patches.note {
        let note = note["metadata"]["annotations"][ORIGINAL_REQUESTS].clone();
        pod["metadata"]["annotations"][ORIGINAL_REQUESTS] = note;
    }
    if patches.release.is_some()
        && let Some(annotations) = pod["metadata"]["annotations"].as_object_mut()
    {
        annotations.remove(ORIGINAL_REQUESTS);
    }
    let Some(resize) = &patches.resize else { return };
    let generation = pod["metadata"]["generation"].as_i64().unwrap_or(0);
    pod["metadata"]["generation"] = json!(generation + 1);
    for change in resize["spec"]["containers"].as_array().into_iter().flatten() {
        let containers = pod["spec"]["containers"].as_array_mut().into_iter().flatten();
        for container in containers.filter(|it| it["name"] == change["name"]) {
            let requests = change["resources"]["requests"].as_object();
            for (resource, amount) in requests.into_iter().flatten() {
                container["resources"]["requests"][resource] = amount.clone();
            }
        }
    }
}
