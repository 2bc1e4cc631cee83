//! Tags resolved at Debian's docker-registry on loopback, with and without credentials.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::TcpStream,
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::Duration,
};

use common::fixtures::ports::unused_port;
use common::wire::NamespacedName;
use controller::{
    decide::machine::{DigestRequest, PullAccount},
    shell::image_digests::{DigestResolver, DigestStatus},
};
use registry::{PullSecret, RegistryClient};
use serde_json::json;
use tests::wait::wait_for;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// Credentials `rouse:secret` in the format of htpasswd.
const HTPASSWD: &str = "rouse:$2y$05$abcdefghijklmnopqrstuuOQiyCxlgf/oeuTqixKmWdcYUh4Hjl0a\n";
/// Credentials `rouse:secret` in the format of docker's configuration.
const DOCKER_AUTH: &str = "cm91c2U6c2VjcmV0";
/// An index without platforms, the smallest manifest that a tag can refer to.
const INDEX: &str =
    r#"{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[]}"#;

/// A registry on loopback, ended on drop.
struct DigestRegistryFixture {
    process: Child,
    folder: PathBuf,
    port: u16,
}

impl DigestRegistryFixture {
    fn start(name: &str) -> Self {
        Self::start_with(name, false)
    }

    /// Starts a registry that wants credentials.
    fn start_with_login(name: &str) -> Self {
        Self::start_with(name, true)
    }

    fn start_with(name: &str, wants_login: bool) -> Self {
        let folder = format!("rouse-test-digests-{name}-{}", std::process::id());
        let folder = std::env::temp_dir().join(folder);
        fs::create_dir_all(&folder).expect("a folder");
        let port = unused_port();
        let mut config = json!({
            "version": "0.1",
            "storage": { "filesystem": { "rootdirectory": folder.join("data") } },
            "http": { "addr": format!("127.0.0.1:{port}") },
        });
        if wants_login {
            fs::write(folder.join("htpasswd"), HTPASSWD).expect("written");
            let path = folder.join("htpasswd");
            config["auth"] = json!({ "htpasswd": { "realm": "test", "path": path } });
        }
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

    fn image(&self, name: &str) -> String {
        format!("127.0.0.1:{}/{name}", self.port)
    }

    /// Uploads an index under a tag. Returns its digest from the registry's response.
    fn push(&self, repository: &str, tag: &str) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).expect("connected");
        let request = format!(
            "PUT /v2/{repository}/manifests/{tag} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\
             Authorization: Basic {DOCKER_AUTH}\r\nContent-Type: application/vnd.oci.image.index.v1+json\r\n\
             Content-Length: {}\r\n\r\n{INDEX}",
            INDEX.len()
        );
        stream.write_all(request.as_bytes()).expect("sent");
        let mut response = String::new();
        stream.read_to_string(&mut response).expect("answered");
        assert!(response.starts_with("HTTP/1.1 201"), "{response}");
        let digest = response.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            name.eq_ignore_ascii_case("docker-content-digest").then(|| value.trim().to_owned())
        });
        digest.expect("the digest of what was put there")
    }

    fn secret(&self) -> PullSecret {
        let config =
            json!({ "auths": { format!("127.0.0.1:{}", self.port): { "auth": DOCKER_AUTH } } });
        PullSecret {
            name: "pull".into(),
            kind: "kubernetes.io/dockerconfigjson".into(),
            data: [(".dockerconfigjson".to_owned(), config.to_string().into_bytes())].into(),
        }
    }
}

impl Drop for DigestRegistryFixture {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Resolves the images of one Revision, in a namespace with these secrets.
async fn resolve_images(images: &[&str], secrets: Vec<PullSecret>) -> DigestStatus {
    let (changed, mut digests_rx) = mpsc::channel(8);
    let secrets = std::collections::BTreeMap::from([("team".to_owned(), secrets)]);
    let resolver = DigestResolver::new(secrets, RegistryClient::new(&[]), changed);
    let shutdown = CancellationToken::new();
    let running = tokio::spawn(std::sync::Arc::clone(&resolver).run(shutdown.clone()));
    let revision = NamespacedName::new("team", "r-00001");
    let request = DigestRequest {
        account: PullAccount { namespace: "team".into(), ..PullAccount::default() },
        images: images.iter().map(|it| ((*it).to_owned(), (*it).to_owned())).collect(),
        timeout: Duration::from_secs(60),
        ..DigestRequest::default()
    };
    let mut result = resolver.request_digests(&revision, request.clone());
    while result == DigestStatus::Pending {
        assert_eq!(digests_rx.recv().await, Some(revision.clone()));
        result = resolver.request_digests(&revision, request.clone());
    }
    shutdown.cancel();
    running.await.expect("the resolver ends");
    result
}

#[tokio::test]
async fn a_tag_is_resolved_without_credentials_where_none_are_wanted() {
    let registry = DigestRegistryFixture::start("open");
    let digest = registry.push("team/app", "v1");
    let image = registry.image("team/app:v1");
    let resolved = format!("{}@{digest}", registry.image("team/app"));
    let pinned = resolved.clone();
    let expected = vec![(image.clone(), resolved.clone()), (pinned.clone(), resolved)];
    assert_eq!(
        resolve_images(&[&image, &pinned], Vec::new()).await,
        DigestStatus::Resolved(expected)
    );
}

#[tokio::test]
async fn credentials_of_the_account_are_used_where_they_are_wanted() {
    let registry = DigestRegistryFixture::start_with_login("login");
    let digest = registry.push("team/app", "v1");
    let image = registry.image("team/app:v1");
    let expected = vec![(image.clone(), format!("{}@{digest}", registry.image("team/app")))];
    assert_eq!(
        resolve_images(&[&image], vec![registry.secret()]).await,
        DigestStatus::Resolved(expected)
    );
    let DigestStatus::Failed(error) = resolve_images(&[&image], Vec::new()).await else {
        panic!("resolved")
    };
    let begin = format!("Unable to fetch image {image:?}: failed to resolve image to digest: ");
    assert!(error.starts_with(&begin) && error.contains("wants credentials"), "{error}");
}

#[tokio::test]
async fn a_missing_tag_is_reported() {
    let registry = DigestRegistryFixture::start("missing");
    registry.push("team/app", "v1");
    let image = registry.image("team/app:v2");
    let DigestStatus::Failed(reason) = resolve_images(&[&image], Vec::new()).await else {
        panic!("resolved")
    };
    assert!(reason.contains("does not have it: check its name and tag"), "{reason}");
}
