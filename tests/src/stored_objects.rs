//! Objects in the folder in which the controller of a local node keeps them, and from which `rouse get` reads them.
//!
//! To read them here starts no process. So a wait reads them first, and runs the command of users only once they are as
//! it wants them. Otherwise scenarios that wait at the same time would use up the processors by their commands.

use std::fs;
use std::path::Path;

use local::NodeLayout;
use serde_json::Value;

/// Pods of a service in the namespace `default`.
pub fn stored_pods(layout: &NodeLayout, service: &str) -> Vec<Value> {
    let folder = layout.objects().join("pods/default");
    let entries = fs::read_dir(&folder).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let files = names.filter(|name| is_pod_of(name, service));
    // A file that is gone by now is that of a pod that is gone.
    files.filter_map(|name| read_object(&folder.join(name))).collect()
}

/// Object of the namespace `default`; null if there is none. `kind` is the plural in small letters.
pub fn stored_object(layout: &NodeLayout, kind: &str, name: &str) -> Value {
    let file = layout.objects().join(kind).join("default").join(format!("{name}.yaml"));
    read_object(&file).unwrap_or_default()
}

/// Reads a file of the controller, which writes JSON.
fn read_object(file: &Path) -> Option<Value> {
    serde_json::from_slice(&fs::read(file).ok()?).ok()
}

/// Returns true if this is the file of a pod of the service, such as `hello-00001-deployment-x4k2p.yaml`.
fn is_pod_of(file: &str, service: &str) -> bool {
    let revision = file.strip_suffix(".yaml").and_then(|pod| pod.split_once("-deployment-"));
    let number =
        revision.and_then(|(revision, _)| revision.strip_prefix(service)?.strip_prefix('-'));
    number.is_some_and(|it| it.len() == 5 && it.bytes().all(|byte| byte.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_belongs_to_the_service_whose_name_is_the_whole_of_its_revision() {
        assert!(is_pod_of("kept-00001-deployment-x4k2p.yaml", "kept"));
        assert!(is_pod_of("kept-a-00012-deployment-x4k2p.yaml", "kept-a"));
        assert!(!is_pod_of("kept-a-00012-deployment-x4k2p.yaml", "kept"));
        assert!(!is_pod_of("kept-00001-deployment-x4k2p.yaml.new", "kept"), "a draft");
        assert!(!is_pod_of("kept10-00001-deployment-x4k2p.yaml", "kept1"));
    }
}
