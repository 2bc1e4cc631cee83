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

/// State of one pod when it was last saved.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SavedPod {
    pub(crate) order: LocalPodSpec,
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
    let order = saved.order.clone();
    let path = layout.pod_state(&order.uid);
    let text = SavedPodFile {
        uid: order.uid,
        name: order.name,
        namespace: order.revision.namespace.into(),
        revision: order.revision.name.into(),
        labels: order.labels,
        address: saved.address.map(PodAddress::v4),
        containers: saved.containers.clone(),
        kubelet_probes: order.kubelet_probes,
        spec: order.spec,
    };
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
            // Without a state the pod is not adopted; the order, if there still is one, makes it again.
            warn!(path = %path.display(), %error, "pod state not understood");
            return None;
        }
    };
    let order = LocalPodSpec {
        uid: text.uid,
        name: text.name,
        revision: NamespacedName::new(text.namespace, text.revision),
        spec: text.spec,
        labels: text.labels,
        kubelet_probes: text.kubelet_probes,
    };
    let address = text.address.and_then(PodAddress::from_v4);
    Some(SavedPod { order, address, containers: text.containers })
}
