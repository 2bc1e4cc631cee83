// Writes random nodes and endpoints with the zone hints that Kubernetes gives them, one JSON object a line.
//
// The decisions are those of Kubernetes' own package k8s.io/endpointslice/topologycache. It iterates over maps, so it may
// decide differently each time: each case lists all decisions of many runs. The first argument is the number of cases, the
// second the seed.
package main

import (
	"encoding/json"
	"fmt"
	"math/rand"
	"os"
	"sort"
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/endpointslice/topologycache"
	"k8s.io/klog/v2"
)

const (
	runs        = 2000
	maxOutcomes = 12
	service     = "default/hello"
)

// Node is a node of the cluster. Empty texts are left out of the object.
type Node struct {
	Zone         string `json:"zone,omitempty"`
	CPU          string `json:"cpu,omitempty"`
	NotReady     bool   `json:"not_ready,omitempty"`
	ControlPlane bool   `json:"control_plane,omitempty"`
}

// Endpoint is one endpoint of the slice, written as its zone, with "!" before it if it is not ready.
type Endpoint struct {
	Zone     string
	NotReady bool
}

// MarshalText implements encoding.TextMarshaler.
func (endpoint Endpoint) MarshalText() ([]byte, error) {
	if endpoint.NotReady {
		return []byte("!" + endpoint.Zone), nil
	}
	return []byte(endpoint.Zone), nil
}

// Decision is the result for one list of nodes.
type Decision struct {
	// The message of the event without the address type; empty if there are hints.
	Refusal string `json:"refusal,omitempty"`
	// The distinct lists of hints, each with the zones of all endpoints, separated by commas.
	Outcomes []string `json:"outcomes,omitempty"`
}

// Case is one line of the output.
type Case struct {
	Nodes     []Node     `json:"nodes"`
	Endpoints []Endpoint `json:"endpoints"`
	Decision  Decision   `json:"decision"`
	// Nodes after a change. Absent without hints before it.
	Later []Node `json:"later,omitempty"`
	// True if the hints of the first outcome, which are in force, overload a zone by the later nodes, so that
	// Kubernetes looks at the Service again. Otherwise they stay.
	Overloaded bool `json:"overloaded,omitempty"`
	// True if Kubernetes keeps hints that overload a zone.
	KeptOverloaded bool `json:"kept_overloaded,omitempty"`
	// Decision for the later nodes without hints before.
	LaterDecision *Decision `json:"later_decision,omitempty"`
}

func nodeObjects(nodes []Node) []*v1.Node {
	var all []*v1.Node
	for index, node := range nodes {
		object := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("n%d", index), Labels: map[string]string{}}}
		if node.Zone != "" {
			object.Labels[v1.LabelTopologyZone] = node.Zone
		}
		if node.ControlPlane {
			object.Labels["node-role.kubernetes.io/control-plane"] = ""
		}
		if node.CPU != "" {
			object.Status.Allocatable = v1.ResourceList{v1.ResourceCPU: resource.MustParse(node.CPU)}
		}
		status := v1.ConditionTrue
		if node.NotReady {
			status = v1.ConditionFalse
		}
		object.Status.Conditions = []v1.NodeCondition{{Type: v1.NodeReady, Status: status}}
		all = append(all, object)
	}
	return all
}

func slice(endpoints []Endpoint, hints []string) *discovery.EndpointSlice {
	result := &discovery.EndpointSlice{AddressType: discovery.AddressTypeIPv4}
	for index, endpoint := range endpoints {
		ready := !endpoint.NotReady
		object := discovery.Endpoint{Addresses: []string{fmt.Sprintf("10.0.0.%d", index)}, Conditions: discovery.EndpointConditions{Ready: &ready}}
		if endpoint.Zone != "" {
			zone := endpoint.Zone
			object.Zone = &zone
		}
		if hints != nil && hints[index] != "" {
			object.Hints = &discovery.EndpointHints{ForZones: []discovery.ForZone{{Name: hints[index]}}}
		}
		result.Endpoints = append(result.Endpoints, object)
	}
	return result
}

func hintsOf(slice *discovery.EndpointSlice) []string {
	hints := []string{}
	for _, endpoint := range slice.Endpoints {
		zone := ""
		if endpoint.Hints != nil {
			zone = endpoint.Hints.ForZones[0].Name
		}
		hints = append(hints, zone)
	}
	return hints
}

// decide returns false if there are too many outcomes to list.
func decide(nodes []Node, endpoints []Endpoint) (Decision, bool) {
	logger := klog.Background()
	seen := map[string]bool{}
	refusal := ""
	for range runs {
		cache := topologycache.NewTopologyCache()
		cache.SetNodes(logger, nodeObjects(nodes))
		info := &topologycache.SliceInfo{
			ServiceKey: service, AddressType: discovery.AddressTypeIPv4,
			ToCreate: []*discovery.EndpointSlice{slice(endpoints, nil)},
		}
		created, _, events := cache.AddHints(logger, info)
		if !cache.HasPopulatedHints(service) {
			message, _, _ := strings.Cut(events[0].Message, ", addressType")
			refusal, _, _ = strings.Cut(message, " (")
			break
		}
		seen[strings.Join(hintsOf(created[0]), ",")] = true
		if len(seen) > maxOutcomes {
			return Decision{}, false
		}
	}
	decision := Decision{Refusal: refusal}
	for hints := range seen {
		decision.Outcomes = append(decision.Outcomes, hints)
	}
	sort.Strings(decision.Outcomes)
	return decision, true
}

func oneOf[T any](r *rand.Rand, all ...T) T { return all[r.Intn(len(all))] }

func randomNode(r *rand.Rand, zones int) Node {
	node := Node{Zone: fmt.Sprintf("z%d", r.Intn(zones)), CPU: oneOf(r, "4", "4", "2", "8", "3920m", "1500m", "0.5", strconv.Itoa(1+r.Intn(64)))}
	switch r.Intn(80) {
	case 0:
		node.Zone = ""
	case 1:
		node.CPU = oneOf(r, "", "0")
	case 2, 3:
		node.NotReady = true
		node.CPU = oneOf(r, node.CPU, "")
	case 4, 5, 6:
		node.ControlPlane = true
		node.Zone = oneOf(r, node.Zone, "")
	}
	return node
}

func randomEndpoint(r *rand.Rand, zones int) Endpoint {
	endpoint := Endpoint{Zone: fmt.Sprintf("z%d", r.Intn(zones))}
	switch r.Intn(250) {
	case 0:
		endpoint.Zone = ""
	case 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16:
		endpoint.NotReady = true
	}
	return endpoint
}

func change(r *rand.Rand, before []Node, zones int) []Node {
	nodes := append([]Node{}, before...)
	for range 1 + r.Intn(2) {
		at := r.Intn(len(nodes))
		switch r.Intn(4) {
		case 0:
			nodes = append(nodes, randomNode(r, zones))
		case 1:
			nodes[at] = randomNode(r, zones)
		case 2:
			nodes[at].NotReady = !nodes[at].NotReady
		case 3:
			nodes[at].CPU = strconv.Itoa(1 + r.Intn(8))
		}
	}
	return nodes
}

func randomCase(r *rand.Rand) (Case, bool) {
	zones := oneOf(r, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4)
	it := Case{Endpoints: []Endpoint{}}
	for index := range zones + r.Intn(5) {
		node := randomNode(r, zones)
		if index < zones && node.Zone != "" {
			node.Zone = fmt.Sprintf("z%d", index)
		}
		it.Nodes = append(it.Nodes, node)
	}
	for range r.Intn(25) {
		it.Endpoints = append(it.Endpoints, randomEndpoint(r, zones))
	}
	decision, ok := decide(it.Nodes, it.Endpoints)
	if !ok {
		return it, false
	}
	it.Decision = decision
	if decision.Refusal != "" {
		return it, true
	}
	it.Later = change(r, it.Nodes, zones)
	inForce := strings.Split(decision.Outcomes[0], ",")
	counts := topologycache.EndpointZoneInfo{}
	for _, zone := range inForce {
		if zone != "" {
			counts[zone]++
		}
	}
	logger := klog.Background()
	cache := topologycache.NewTopologyCache()
	cache.SetHints(service, discovery.AddressTypeIPv4, counts)
	cache.SetNodes(logger, nodeObjects(it.Later))
	it.Overloaded = len(cache.GetOverloadedServices()) > 0
	if it.Overloaded {
		info := &topologycache.SliceInfo{
			ServiceKey: service, AddressType: discovery.AddressTypeIPv4,
			Unchanged: []*discovery.EndpointSlice{slice(it.Endpoints, inForce)},
		}
		_, updated, _ := cache.AddHints(logger, info)
		it.KeptOverloaded = len(updated) == 0
	}
	later, ok := decide(it.Later, it.Endpoints)
	it.LaterDecision = &later
	return it, ok
}

func main() {
	count, err := strconv.Atoi(os.Args[1])
	if err != nil {
		panic(err)
	}
	seed, err := strconv.ParseInt(os.Args[2], 10, 64)
	if err != nil {
		panic(err)
	}
	r := rand.New(rand.NewSource(seed))
	out := json.NewEncoder(os.Stdout)
	for count > 0 {
		it, ok := randomCase(r)
		if !ok {
			continue
		}
		if err := out.Encode(it); err != nil {
			panic(err)
		}
		count--
	}
}
