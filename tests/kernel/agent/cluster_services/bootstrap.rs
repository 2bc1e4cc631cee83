//! Shell: agents with several API servers, and agents that start from the bootstrap file, in the running kernel.

use std::fs::File;

use super::{super::fake_watch_server::SERVER_ADDRESS, *};

/// Address of a second API server in the namespace of the node.
const SECOND_ADDRESS: &str = "127.0.0.1:6444";
/// Address of an API server that the agent learns. At other than loopback addresses it would be asked over TLS.
const LEARNT_ADDRESS: &str = "127.0.0.2:6445";
/// Endpoint of the Service, as the file has it.
const ENDPOINT: &str = "10.77.0.2:8080";

/// Returns the Service or EndpointSlice as that of the API server's own Service.
fn as_api_server(mut object: Value) -> Value {
    let metadata = &mut object["metadata"];
    metadata["name"] = "kubernetes".into();
    if metadata["labels"].is_object() {
        metadata["labels"] = json!({"kubernetes.io/service-name": "kubernetes"});
    }
    object
}

/// Returns the Service as the DNS of the cluster.
fn dns_service() -> Value {
    let mut service = service(None);
    service["metadata"]["namespace"] = "kube-system".into();
    service["metadata"]["labels"] = json!({"k8s-app": "kube-dns"});
    service
}

/// Returns the EndpointSlice of the DNS of the cluster.
fn dns_slice() -> Value {
    let mut slice = endpoint_slice(&["10.77.0.2"]);
    slice["metadata"]["namespace"] = "kube-system".into();
    slice
}

impl AgentFixture {
    fn netns(&self) -> String {
        format!("{}-n", self.name)
    }

    fn state_folder(&self) -> PathBuf {
        self.folder.join("state")
    }

    /// Starts an agent in mode `all` with a bootstrap file. Its log goes to the file `log`.
    fn start_agent_with_file(&mut self) {
        let log = File::create(self.folder.join("log")).expect("a file");
        let mut command = self.cluster_agent_command(&[("ROUSE_CLUSTERIP", "all")]);
        command.env("ROUSE_STATE", self.state_folder()).stderr(log);
        self.agent = Some(command.spawn().expect("nsenter"));
    }

    /// Waits until a file in the folder of the test contains the text.
    fn wait_text(&self, file: &str, text: &str) {
        self.wait_content(file, text, true);
    }

    /// Waits until a file in the folder of the test does not contain the text.
    fn wait_without_text(&self, file: &str, text: &str) {
        self.wait_content(file, text, false);
    }

    fn wait_content(&self, file: &str, text: &str, is_expected: bool) {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        loop {
            let content = fs::read_to_string(self.folder.join(file)).unwrap_or_default();
            if content.contains(text) == is_expected {
                return;
            }
            assert!(Instant::now() < deadline, "{text}: expected {is_expected}: {content}");
            thread::sleep(Duration::from_millis(10));
        }
    }
}

/// The Service is the API server's own: agents that know API servers by their addresses serve it like any other.
#[test]
fn another_api_server_takes_over_when_one_goes_away() {
    let mut fixture = AgentFixture::new("takeover");
    let netns = fixture.netns();
    let mut first = FakeWatchServer::start(&netns);
    let mut second = first.start_replica(&netns, SECOND_ADDRESS);
    let slice = |addresses: &[&str]| as_api_server(endpoint_slice(addresses));
    set_node(&first);
    first.set(as_api_server(service(None)));
    first.set(slice(&["10.77.0.2"]));
    fixture.start_pod();
    fixture.send_to_pod("listen");
    let mut command = fixture.cluster_agent_command(&[("ROUSE_CLUSTERIP", "all")]);
    let servers = format!("http://{SERVER_ADDRESS},http://{SECOND_ADDRESS}");
    fixture.agent = Some(command.env("ROUSE_APISERVERS", servers).spawn().expect("nsenter"));
    fixture.wait_outcome("connected");
    first.stop();
    second.set(slice(&[]));
    fixture.wait_outcome("refused");
    first.resume(&netns);
    second.stop();
    first.set(slice(&["10.77.0.2"]));
    fixture.wait_outcome("connected");
}

#[test]
fn the_api_server_of_the_kubelet_is_asked_like_a_given_one() {
    let mut fixture = AgentFixture::new("kubelet");
    let netns = fixture.netns();
    let mut configured = FakeWatchServer::start(&netns);
    let of_kubelet = configured.start_replica(&netns, SECOND_ADDRESS);
    configured.stop();
    set_node(&of_kubelet);
    of_kubelet.set(service(None));
    of_kubelet.set(endpoint_slice(&["10.77.0.2"]));
    let mut kubeconfig = FakeWatchServer::kubeconfig();
    kubeconfig["clusters"][0]["cluster"]["server"] = format!("http://{SECOND_ADDRESS}").into();
    let file = fixture.folder.join("kubelet.conf");
    fs::write(&file, kubeconfig.to_string()).expect("a file");
    fixture.start_pod();
    fixture.send_to_pod("listen");
    let file = file.to_str().expect("text");
    let settings = [("ROUSE_CLUSTERIP", "all"), ("ROUSE_KUBELET_KUBECONFIG", file)];
    fixture.start_agent_with_settings(&settings);
    fixture.wait_outcome("connected");
}

#[test]
fn learnt_api_servers_are_asked_when_the_configured_one_goes_away() {
    let mut fixture = AgentFixture::new("learnt");
    let netns = fixture.netns();
    let mut configured = FakeWatchServer::start(&netns);
    let learnt = configured.start_replica(&netns, LEARNT_ADDRESS);
    let mut api_servers = as_api_server(endpoint_slice(&["127.0.0.2"]));
    api_servers["ports"] = json!([{"name": "https", "port": 6445, "protocol": "TCP"}]);
    set_node(&configured);
    configured.set(api_servers);
    configured.set(service(None));
    configured.set(endpoint_slice(&["10.77.0.2"]));
    fixture.start_pod();
    fixture.send_to_pod("listen");
    fixture.start_agent_with_file();
    fixture.wait_outcome("connected");
    fixture.wait_text("state/n1.json", LEARNT_ADDRESS);
    configured.stop();
    learnt.set(endpoint_slice(&[]));
    fixture.wait_outcome("refused");
    // The next agent remembers it.
    fixture.kill_agent();
    learnt.set(endpoint_slice(&["10.77.0.2"]));
    fixture.start_agent_with_file();
    fixture.wait_outcome("connected");
}

#[test]
fn empty_maps_follow_the_bootstrap_file_while_the_api_server_is_away() {
    let mut fixture = AgentFixture::new("booted");
    let netns = fixture.netns();
    let mut server = FakeWatchServer::start(&netns);
    set_node(&server);
    server.set(dns_service());
    server.set(dns_slice());
    fixture.start_pod();
    fixture.send_to_pod("listen");
    fixture.start_agent_with_file();
    fixture.wait_outcome("connected");
    fixture.wait_text("state/n1.json", ENDPOINT);
    fixture.kill_agent();
    server.stop();
    // No pin is left, as after a reboot.
    let unpin = format!("umount {}", fixture.folder.join("bpf").display());
    run_shell(&unpin);
    fixture.wait_outcome("unchanged");
    // The lists are of this boot: a time without the mode may have emptied the maps.
    fixture.start_agent_with_file();
    fixture.wait_not_ready_reason("clusterip:");
    fixture.wait_outcome("unchanged");
    fixture.kill_agent();
    run_shell(&unpin);
    let file = fixture.state_folder().join("n1.json");
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("it has one");
    let text = fs::read_to_string(&file).expect("it was written");
    fs::write(&file, text.replace(boot.trim(), "an earlier boot")).expect("a file");
    fixture.start_agent_with_file();
    fixture.wait_outcome("connected");
    fixture.wait_not_ready_reason("clusterip:");
    server.delete_silently("Service", "plain");
    server.resume(&netns);
    fixture.wait_outcome("unchanged");
    fixture.wait_without_text("state/n1.json", ENDPOINT);
}

#[test]
fn a_broken_bootstrap_file_is_logged_and_replaced() {
    let mut fixture = AgentFixture::new("broken");
    let server = FakeWatchServer::start(&fixture.netns());
    set_node(&server);
    server.set(dns_service());
    server.set(dns_slice());
    fs::create_dir(fixture.state_folder()).expect("a folder");
    let file = fixture.state_folder().join("n1.json");
    fs::write(&file, "{\"format\": 1}").expect("a file");
    fixture.start_pod();
    fixture.send_to_pod("listen");
    fixture.start_agent_with_file();
    fixture.wait_text("log", "bootstrap file is ignored");
    fixture.wait_text("log", &file.display().to_string());
    fixture.wait_text("log", "it is no bootstrap file of an agent");
    fixture.wait_outcome("connected");
    fixture.wait_text("state/n1.json", ENDPOINT);
    fixture.wait_text("state/n1.json.ignored", "{\"format\": 1}");
}
