// Upstream's conformance tests of the Gateway API as one program, which writes the result of each test as JSON.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"sigs.k8s.io/gateway-api/conformance"
	"sigs.k8s.io/gateway-api/conformance/tests"
	"sigs.k8s.io/gateway-api/conformance/utils/suite"
	"sigs.k8s.io/gateway-api/pkg/features"
)

// conformanceResult is the result of one test.
type conformanceResult struct {
	Name     string                 `json:"name"`
	Features []features.FeatureName `json:"features"`
	// Unsupported has those of the features because of which the test was skipped.
	Unsupported []features.FeatureName `json:"unsupported"`
	// Result is passed, failed, skipped, or missing if the suite ended before the test.
	Result string `json:"result"`
}

// All other flags are those of upstream's own test program.
var resultsFile = flag.String("results", "", "File for the results of all tests as JSON")

// imageLine is a line of a manifest that names an image.
var imageLine = regexp.MustCompile(`(?m)^[ -]*image:\s*"?([^"\s]+)`)

func main() {
	if len(os.Args) == 2 && os.Args[1] == "--images" {
		printImages()
		return
	}
	run := []testing.InternalTest{{Name: "TestConformance", F: runConformance}}
	testing.Main(func(_, _ string) (bool, error) { return true, nil }, run, nil, nil)
}

// printImages prints the names of the images that the suite's manifests use. Those for meshes are left out.
func printImages() {
	var images []string
	collect := func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !strings.HasSuffix(path, ".yaml") {
			return err
		}
		text, err := conformance.Manifests.ReadFile(path)
		for _, match := range imageLine.FindAllSubmatch(text, -1) {
			images = append(images, string(match[1]))
		}
		return err
	}
	for _, folder := range []string{"base", "tests"} {
		if err := fs.WalkDir(conformance.Manifests, folder, collect); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	slices.Sort(images)
	for _, image := range slices.Compact(images) {
		fmt.Println(image)
	}
}

func runConformance(t *testing.T) {
	options := conformance.DefaultOptions(t)
	var lock sync.Mutex
	results := map[string]conformanceResult{}
	options.Hook = func(t *testing.T, test suite.ConformanceTest, ran *suite.ConformanceTestSuite) {
		result := conformanceResult{Name: test.ShortName, Features: test.Features, Result: "passed"}
		if t.Failed() {
			result.Result = "failed"
		} else if t.Skipped() {
			result.Result = "skipped"
		}
		for _, feature := range test.Features {
			if !ran.SupportedFeatures.Has(feature) {
				result.Unsupported = append(result.Unsupported, feature)
			}
		}
		lock.Lock()
		defer lock.Unlock()
		results[test.ShortName] = result
	}
	// It runs last, also if the suite ends before its tests.
	t.Cleanup(func() { writeResults(t, results) })
	conformance.RunConformanceWithOptions(t, options)
}

// writeResults writes the results of all tests that the suite has.
func writeResults(t *testing.T, results map[string]conformanceResult) {
	var all []conformanceResult
	for _, test := range tests.ConformanceTests {
		result, hasRun := results[test.ShortName]
		if !hasRun {
			result = conformanceResult{Name: test.ShortName, Features: test.Features, Result: "missing"}
		}
		all = append(all, result)
	}
	text, err := json.MarshalIndent(all, "", "  ")
	if err == nil {
		err = os.WriteFile(*resultsFile, text, 0o644)
	}
	if err != nil {
		t.Errorf("cannot write the results: %v", err)
	}
}
