//! What the kubelet asks is its own business: it is no request of the service, in whatever protocol and by whatever name.

use tests::installed::{CONTAINER, Installed, service};

#[test]
fn a_service_falls_asleep_whatever_probes_it_has() {
    let rouse = Installed::at_hand();
    let space = rouse.namespace("probes");
    let namespace = &space.name;
    let port = "ports: [{name: h2c, containerPort: 8080}]";
    let grpc = "{periodSeconds: 1, grpc: {port: 8080}}";
    let agent = "httpHeaders: [{name: User-Agent, value: uptime-check/1}]";
    let all = [
        ("plain", "livenessProbe: {periodSeconds: 1, httpGet: {path: /}}".to_owned()),
        ("agent", format!("livenessProbe: {{periodSeconds: 1, httpGet: {{path: /, {agent}}}}}")),
        ("grpc", format!("{port}, readinessProbe: {grpc}, livenessProbe: {grpc}")),
    ];
    let yaml =
        all.each_ref().map(|(name, probe)| service(name, "", &format!("{CONTAINER}, {probe}")));
    rouse.ready(namespace, &yaml.join("---\n"));
    for (name, _) in &all {
        rouse.asleep(namespace, name);
        let url = rouse.url(namespace, name);
        let mut words = vec!["curl", "--silent", "--max-time", "30", &url];
        words.extend((*name == "grpc").then_some("--http2-prior-knowledge"));
        let said = rouse.from("node1").command(&words).output().expect("curl is there");
        let said = String::from_utf8_lossy(&said.stdout);
        assert!(said.starts_with("Hello from"), "{name}: {said}");
    }
    all.iter().for_each(|(name, _)| rouse.asleep(namespace, name));
}
