//! Services of a bench, which sleep until it wakes them.

/// Returns the manifest of the service `sleeper-AT`, which begins without a pod.
pub(crate) fn service_manifest(at: usize) -> String {
    format!(
        "apiVersion: serving.knative.dev/v1
kind: Service
metadata: {{ name: sleeper-{at}, namespace: default }}
spec:
  template:
    metadata: {{ annotations: {{ autoscaling.knative.dev/initial-scale: \"0\" }} }}
    spec: {{ containers: [{{ image: \"dev.local/hello:v1\" }}] }}
"
    )
}
