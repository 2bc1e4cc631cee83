//! Images of several layers: files that upper layers replace, remove and hide; blobs that do not match their digest.

use std::fs;
use std::path::Path;

use common::local_node::{ContainerRunState, PodRunPhase};
use serde_json::json;
use tests::images::{LayerEntry, base_layer, layer, scratch_directory, write_layout};
use tests::test_node::{TestNode, pod_spec};

/// A directory that is removed on drop.
struct ImageFolder(std::path::PathBuf);

impl Drop for ImageFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

impl ImageFolder {
    fn new(layers: &[Vec<u8>]) -> Self {
        let folder = scratch_directory("layers");
        write_layout(&folder, "v1", layers);
        Self(folder)
    }

    fn image(&self) -> String {
        format!("oci:{}:v1", self.0.display())
    }
}

/// Lower layer, with one file for each way in which the upper layer changes it.
fn lower_layer() -> Vec<u8> {
    layer(&[
        LayerEntry::File("stays", b"stays;"),
        LayerEntry::File("replaced", b"old;"),
        LayerEntry::File("linked", b"old;"),
        LayerEntry::Pipe("pipe"),
        LayerEntry::File("removed", b"removed;"),
        LayerEntry::File("gone/deep/file", b"gone;"),
        LayerEntry::File("opaque/hidden", b"hidden;"),
        LayerEntry::File("opaque/both/hidden", b"hidden below;"),
        LayerEntry::File("folder/file", b"was a folder;"),
        LayerEntry::File("file", b"was a file;"),
        LayerEntry::Link("link", "stays"),
    ])
}

fn upper_layer() -> Vec<u8> {
    layer(&[
        LayerEntry::File("replaced", b"new;"),
        LayerEntry::HardLink("linked", "replaced"),
        LayerEntry::Pipe("pipe"),
        LayerEntry::File(".wh.removed", b""),
        LayerEntry::File(".wh.gone", b""),
        // Whiteouts may come after files of the same layer, which they must not affect.
        LayerEntry::File("opaque/both/added", b"added below;"),
        LayerEntry::File("opaque/added", b"added;"),
        LayerEntry::File("opaque/.wh..wh..opq", b""),
        LayerEntry::Link("folder", "opaque"),
        LayerEntry::Folder("file"),
        LayerEntry::File("file/inside", b"inside;"),
        LayerEntry::File("link", b"a file now;"),
    ])
}

#[test]
fn upper_layers_replace_remove_and_hide_what_is_below() {
    let folder = ImageFolder::new(&[base_layer(), lower_layer(), upper_layer()]);
    let mut node = TestNode::new("layers");
    let expected = [
        "stays",
        "replaced",
        "linked",
        "removed",
        "gone/deep/file",
        "opaque/hidden",
        "opaque/both/hidden",
        "opaque/both/added",
        "opaque/added",
        "folder/added",
        "folder/file",
        "file/inside",
        "link",
        ".wh.removed",
        "opaque/.wh..wh..opq",
    ];
    let mut args: Vec<String> = expected.iter().map(|path| format!("show=/{path}")).collect();
    args.extend(["say=end".to_owned(), "wait".to_owned()]);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    node.set_pods([pod_spec("a", &args, json!({ "container": { "image": folder.image() } }))]);
    node.wait_pod("a running pod", "a", |pod| pod.phase == PodRunPhase::Running);
    let log = node.wait_log("pod-a", "end\n");
    assert_eq!(log, "stays;new;new;added below;added;added;inside;a file now;end\n");
}

#[test]
fn a_link_of_a_lower_layer_does_not_lead_an_upper_one_out_of_the_image() {
    let outside = scratch_directory("outside");
    let out = outside.to_str().expect("a path");
    let link_layer =
        layer(&[LayerEntry::Link("way", out), LayerEntry::File("way/planted", b"planted;")]);
    let file_layer = layer(&[
        LayerEntry::File("way/again", b"again;"),
        LayerEntry::File("way/.wh..wh..opq", b""),
    ]);
    fs::write(outside.join("kept"), "kept").expect("a file");
    let folder = ImageFolder::new(&[base_layer(), link_layer, file_layer]);
    let mut node = TestNode::new("escape");
    let args = ["say=end", "wait"];
    node.set_pods([pod_spec("a", &args, json!({ "container": { "image": folder.image() } }))]);
    // Unpacked inside the image or refused: in both cases the host's directory must stay unchanged.
    node.wait("an end", |pods| {
        pods.get("a").is_some_and(|pod| {
            let waits = |one: &ContainerRunState| matches!(one, ContainerRunState::Waiting { reason, .. } if reason == "ImagePullBackOff");
            pod.phase == PodRunPhase::Running || pod.containers.iter().any(|container| waits(&container.state))
        })
    });
    let names: Vec<_> =
        fs::read_dir(&outside).expect("a folder").flatten().map(|one| one.file_name()).collect();
    fs::remove_dir_all(&outside).expect("our own folder");
    assert_eq!(names, ["kept"]);
}

/// Appends a byte to each blob that contains `text_part`.
fn corrupt_blobs(folder: &Path, text_part: &str) {
    for entry in fs::read_dir(folder.join("blobs/sha256")).expect("blobs").flatten() {
        let mut bytes = fs::read(entry.path()).expect("a blob");
        if bytes.windows(text_part.len()).any(|window| window == text_part.as_bytes()) {
            bytes.push(b' ');
            fs::write(entry.path(), bytes).expect("a blob");
        }
    }
}

#[test]
fn a_blob_that_is_not_what_its_digest_says_is_refused_in_one_line() {
    let mut node = TestNode::new("damaged");
    // One error for each image, because an unpacked blob is not read again.
    let parts = ["\"layers\":[", "diff_ids", "etc/passwd"];
    let folders = parts.map(|text_part| {
        let folder = ImageFolder::new(&[
            base_layer(),
            layer(&[LayerEntry::File("part", text_part.as_bytes())]),
        ]);
        corrupt_blobs(&folder.0, text_part);
        folder
    });
    let container = |at: usize| json!({ "container": { "image": folders[at].image() } });
    node.set_pods([
        pod_spec("a", &[], container(0)),
        pod_spec("b", &[], container(1)),
        pod_spec("c", &[], container(2)),
    ]);
    for uid in ["a", "b", "c"] {
        node.wait_pod("a refusal", uid, |pod| {
            pod.containers.iter().any(|container| {
                matches!(&container.state, ContainerRunState::Waiting { reason, message, .. }
                    if reason == "ImagePullBackOff" && message.contains("is damaged: its digest is")
                        && !message.contains('\n'))
            })
        });
    }
}
