//! Https for names inside the cluster, with the certificates of Rouse's own authority.

use std::{path::Path, process::Stdio};

use tests::client_pod::ClientPod;
use tests::installed_cluster::{
    HELLO_CONTAINER, RouseCluster, SYSTEM_NAMESPACE, service_manifest, set_config_map,
};
use tests::test_cluster::TestCluster;

/// Key of `config-network` that turns https for names inside the cluster on.
const LOCAL_TLS_KEY: &str = "cluster-local-domain-tls";

/// The setting, on until this value is dropped.
struct LocalTls<'a>(&'a TestCluster);

impl<'a> LocalTls<'a> {
    fn enable(rouse: &'a RouseCluster) -> Self {
        let guard = Self(&rouse.cluster);
        set_config_map(&rouse.cluster, "config-network", &[LOCAL_TLS_KEY], "\"Enabled\"")
            .expect("a good value is taken");
        guard
    }
}

impl Drop for LocalTls<'_> {
    fn drop(&mut self) {
        let _stays = set_config_map(self.0, "config-network", &[LOCAL_TLS_KEY], "null");
    }
}

/// Returns the status of curl's response to a request from inside the cluster, such as `200`. A failed handshake is an
/// error, with curl's message.
fn curl(
    client: &ClientPod,
    url: &str,
    (host, address): (&str, &str),
    authority: &Path,
) -> Result<String, String> {
    let ports = [80, 443].map(|port| format!("{host}:{port}:{address}"));
    let resolve = ["--resolve", &ports[0], "--resolve", &ports[1]];
    let authority = authority.display().to_string();
    let args = ["curl", "--silent", "--show-error", "--noproxy", "*", "--max-time", "60"];
    let output = ["--cacert", &authority, "--output", "/dev/null", "--write-out", "%{http_code}"];
    let command = [&args[..], &resolve, &output, &[url]].concat();
    let output = client.command(&command).stdin(Stdio::null()).output().expect("sh is there");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    match output.status.success() {
        true => Ok(text(&output.stdout)),
        false => Err(text(&output.stderr)),
    }
}

#[test]
fn clients_inside_the_cluster_trust_the_published_bundle() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("local-tls");
    let _on = LocalTls::enable(&rouse);
    let service = service_manifest("hello", "", HELLO_CONTAINER);
    rouse.apply_until_ready(&namespace.name, &service);
    let route = rouse.wait_ready(&namespace.name, "route", "hello");
    let longest = format!("hello.{}.svc.cluster.local", namespace.name);
    assert_eq!(route["status"]["address"]["url"], format!("https://{longest}"));

    let folder = tempfile::tempdir().expect("a folder");
    let authority = folder.path().join("ca.crt");
    let bundles = rouse.cluster.get(&[
        "configmaps",
        "--namespace",
        SYSTEM_NAMESPACE,
        "--selector",
        "networking.knative.dev/trust-bundle=true",
    ]);
    let bundle = bundles["items"][0]["data"]["ca.crt"].as_str().expect("a bundle");
    std::fs::write(&authority, bundle).expect("a file");

    let url = rouse.service_url(&namespace.name, "hello");
    let address = url.trim_start_matches("http://");
    let client = rouse.client_on("node1");
    let names = [longest.clone(), format!("hello.{}.svc", namespace.name)];
    let names = names.into_iter().chain([format!("hello.{}", namespace.name)]);
    for host in names {
        let at = (host.as_str(), address);
        let https = format!("https://{host}/");
        let status = rouse.cluster.wait(&format!("a verified response of {https}"), || {
            curl(client, &https, at, &authority).ok()
        });
        assert_eq!(status, "200", "{https}");
        // Plain http is served on, and not redirected.
        let plain = curl(client, &format!("http://{host}/"), at, &authority);
        assert_eq!(plain.as_deref(), Ok("200"), "{host}");
    }
    // Asleep, the request that begins with a handshake wakes the service.
    rouse.wait_asleep(&namespace.name, "hello");
    let at = (longest.as_str(), address);
    let woken = curl(client, &format!("https://{longest}/"), at, &authority);
    assert_eq!(woken.as_deref(), Ok("200"));
    // The certificate is for this service alone.
    let foreign = ("other.default.svc", address);
    let refused = curl(client, "https://other.default.svc/", foreign, &authority);
    assert!(refused.is_err(), "{refused:?}");
}
