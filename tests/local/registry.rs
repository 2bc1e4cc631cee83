//! Images pulled from Debian's docker-registry on loopback, with credentials.

use std::fs;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use common::fixtures::ports::unused_port;
use common::local_node::{ContainerRunState, PodRunPhase};
use serde_json::json;
use tests::images::test_images;
use tests::test_node::{TestNode, pod_spec};
use tests::wait::wait_for;

/// Credentials `rouse:secret` in the format of htpasswd.
const HTPASSWD: &str = "rouse:$2y$05$abcdefghijklmnopqrstuuOQiyCxlgf/oeuTqixKmWdcYUh4Hjl0a\n";
/// Credentials `rouse:secret` in the format of docker's and skopeo's configuration.
const DOCKER_AUTH: &str = "cm91c2U6c2VjcmV0";

/// A registry on loopback that wants credentials, ended on drop.
struct ImageRegistryFixture {
    process: Child,
    folder: PathBuf,
    port: u16,
}

impl ImageRegistryFixture {
    fn start() -> Self {
        let folder =
            std::env::temp_dir().join(format!("rouse-test-registry-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        let port = unused_port();
        fs::write(folder.join("htpasswd"), HTPASSWD).expect("written");
        let config = json!({
            "version": "0.1",
            "storage": { "filesystem": { "rootdirectory": folder.join("data") } },
            "http": { "addr": format!("127.0.0.1:{port}") },
            "auth": { "htpasswd": { "realm": "test", "path": folder.join("htpasswd") } },
        });
        // The configuration may be JSON, because JSON is YAML.
        fs::write(folder.join("config.yml"), config.to_string()).expect("written");
        let mut command = Command::new("docker-registry");
        command.arg("serve").arg(folder.join("config.yml"));
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let process = command.spawn().expect("docker-registry: apt-get install docker-registry");
        // Constructed before the wait, so that drop kills the process also if it never listens.
        let registry = Self { process, folder, port };
        wait_for("docker-registry to listen", || {
            TcpStream::connect(("127.0.0.1", port)).ok().map(drop)
        });
        registry
    }

    fn push(&self, layout: &Path, name: &str) -> String {
        let image = format!("127.0.0.1:{}/{name}", self.port);
        let mut command = Command::new("skopeo");
        command.args(["copy", "-q", "--dest-tls-verify=false", "--dest-creds=rouse:secret"]);
        command.arg(format!("oci:{}", layout.display())).arg(format!("docker://{image}"));
        assert!(command.status().expect("skopeo: apt-get install skopeo").success());
        image
    }

    fn credentials(&self) -> PathBuf {
        let path = self.folder.join("auth.json");
        let auths =
            json!({ "auths": { format!("127.0.0.1:{}", self.port): { "auth": DOCKER_AUTH } } });
        fs::write(&path, auths.to_string()).expect("written");
        path
    }
}

impl Drop for ImageRegistryFixture {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn is_waiting_with(state: &ContainerRunState, text_part: &str) -> bool {
    matches!(state, ContainerRunState::Waiting { reason, message, .. }
        if reason == "ImagePullBackOff" && message.contains(text_part) && !message.contains('\n'))
}

#[test]
fn an_image_is_pulled_with_credentials_and_kept() {
    let registry = ImageRegistryFixture::start();
    let image = registry.push(&test_images().join("dev.local/app"), "team/app:v1");
    let mut node = TestNode::with_runtime("pull", None, vec![registry.credentials()]);
    let container = |image: &str| json!({ "container": { "image": image } });
    let missing = format!("127.0.0.1:{}/team/none:v1", registry.port);
    node.set_pods([
        pod_spec("a", &["wait"], container(&image)),
        pod_spec("b", &[], container(&missing)),
    ]);
    node.wait_pod("a pulled image", "a", |pod| pod.phase == PodRunPhase::Running);
    node.wait_pod("a missing image", "b", |pod| {
        pod.containers
            .iter()
            .any(|container| is_waiting_with(&container.state, "check its name and tag"))
    });
    drop(registry);
    node.set_pods([pod_spec("c", &["wait"], container(&image))]);
    node.wait_pod("the image kept", "c", |pod| pod.phase == PodRunPhase::Running);
}

#[test]
fn without_credentials_the_message_says_to_log_in() {
    let registry = ImageRegistryFixture::start();
    let image = registry.push(&test_images().join("dev.local/app"), "app:v1");
    let mut node = TestNode::with_runtime("nologin", None, Vec::new());
    node.set_pods([pod_spec("a", &["wait"], json!({ "container": { "image": image } }))]);
    node.wait_pod("a refusal", "a", |pod| {
        pod.containers.iter().any(|container| is_waiting_with(&container.state, "skopeo login"))
    });
}
