//! Shell: state of each pod on disk, for a restart of the node's process.

use std::collections::BTreeMap;
use std::fs;
use std::net::Ipv4Addr;

use common::local_node::LocalPodSpec;
use common::wire::NamespacedName;
use k8s_openapi::api::core::v1::PodSpec;
use serde::{Deserialize, Serialize};
use tracing::warn;

use crate::addresses::PodAddress;
use crate::layout::NodeLayout;
use crate::pods::ContainerExit;

/// State of one pod when it was last saved.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SavedPod {
    pub(crate) pod_spec: LocalPodSpec,
    pub(crate) address: Option<PodAddress>,
    pub(crate) containers: Vec<SavedContainer>,
}

/// State of one container; its place in the list is its index in the pod.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct SavedContainer {
    pub(crate) restarts: u32,
    /// True if the startup probe had passed.
    #[serde(default)]
    pub(crate) started: bool,
    /// True if the readiness probe had passed.
    #[serde(default)]
    pub(crate) ready: bool,
    /// Exit code of the last run of a container that waits for its next start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) last_exit: Option<i32>,
    /// Exit of a container that does not start again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) exit: Option<ContainerExit>,
}

/// Shape of the JSON file. New fields need a default: an older version may have written the file.
#[derive(Serialize, Deserialize)]
struct SavedPodFile {
    uid: String,
    name: String,
    namespace: String,
    revision: String,
    labels: BTreeMap<String, String>,
    address: Option<Ipv4Addr>,
    containers: Vec<SavedContainer>,
    #[serde(default)]
    kubelet_probes: bool,
    spec: PodSpec,
}

/// Writes a pod's state atomically: to a second file that is then renamed.
pub(crate) fn save_pod(layout: &NodeLayout, saved: &SavedPod) {
    let pod_spec = saved.pod_spec.clone();
    let path = layout.pod_state(&pod_spec.uid);
    let text = SavedPodFile {
        uid: pod_spec.uid,
        name: pod_spec.name,
        namespace: pod_spec.revision.namespace.into(),
        revision: pod_spec.revision.name.into(),
        labels: pod_spec.labels,
        address: saved.address.map(PodAddress::v4),
        containers: saved.containers.clone(),
        kubelet_probes: pod_spec.kubelet_probes,
        spec: pod_spec.spec,
    };
    // A crash during the write leaves the last state whole.
    let temporary = path.with_extension("half");
    let written = serde_json::to_vec(&text).map_err(std::io::Error::from);
    let written = written
        .and_then(|bytes| fs::write(&temporary, bytes))
        .and_then(|()| fs::rename(&temporary, &path));
    if let Err(error) = written {
        warn!(path = %path.display(), %error, "pod state not saved");
    }
}

/// Loads the pods that an earlier node process left.
pub(crate) fn load_pods(layout: &NodeLayout) -> Vec<SavedPod> {
    let Ok(entries) = fs::read_dir(layout.pods()) else { return Vec::new() };
    let uids = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    uids.filter_map(|uid| load_pod(layout, &uid)).collect()
}

fn load_pod(layout: &NodeLayout, uid: &str) -> Option<SavedPod> {
    let path = layout.pod_state(uid);
    let bytes = fs::read(&path).ok()?;
    let text: SavedPodFile = match serde_json::from_slice(&bytes) {
        Ok(text) => text,
        Err(error) => {
            // Without a state the pod is not adopted. If the node spec still contains the pod, it is created again.
            warn!(path = %path.display(), %error, "pod state not understood");
            return None;
        }
    };
    let pod_spec = LocalPodSpec {
        uid: text.uid,
        name: text.name,
        revision: NamespacedName::new(text.namespace, text.revision),
        spec: text.spec,
        labels: text.labels,
        kubelet_probes: text.kubelet_probes,
    };
    let address = text.address.and_then(PodAddress::from_v4);
    Some(SavedPod { pod_spec, address, containers: text.containers })
}
