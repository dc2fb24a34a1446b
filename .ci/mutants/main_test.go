package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const sample = `promise: 3
# why
test: . TestSum
file: sum.go
<<<<<<< old
	return a + b
=======
NEW
>>>>>>>
`

// module writes a small module with a test, as a tree to work in.
func module(t *testing.T) *tree {
	root := t.TempDir()
	for name, text := range map[string]string{
		"go.mod": "module sum\n\ngo 1.25\n",
		"sum.go": "package sum\n\nfunc sum(a, b int) int {\n\treturn a + b\n}\n",
		"sum_test.go": `package sum

import "testing"

func TestSum(t *testing.T) {
	if sum(1, 2) != 3 {
		t.Error("not 3")
	}
}

func TestRed(t *testing.T) { t.Error("always") }
`,
	} {
		if err := os.WriteFile(filepath.Join(root, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("GOWORK", "off")
	return &tree{root, map[test]string{}}
}

func TestVerdictOnAMutant(t *testing.T) {
	tr := module(t)
	for name, c := range map[string]struct{ replacement, want string }{
		"red":              {"\treturn a - b", ""},
		"a crash is red":   {"\tpanic(\"broken\")", ""},
		"green":            {"\treturn b + a", "SURVIVED"},
		"does not compile": {"\treturn c", "does not compile"},
	} {
		t.Run(name, func(t *testing.T) {
			m, err := parseMutant("03-sum", strings.Replace(sample, "NEW", c.replacement, 1))
			if err != nil {
				t.Fatal(err)
			}
			check(t, tr.expectRed(t.Context(), m), c.want)
			check(t, tr.expectGreen(t.Context(), m.test), "") // all is as before
		})
	}
}

func TestVerdictWithoutAMutant(t *testing.T) {
	tr := module(t)
	check(t, tr.expectGreen(t.Context(), test{module: ".", run: "TestSum"}), "")
	check(t, tr.expectGreen(t.Context(), test{module: ".", run: "TestRed"}), "fails without")
	check(t, tr.expectGreen(t.Context(), test{module: ".", run: "TestNone"}), "no test of that name")
}

func check(t *testing.T, res result, want string) {
	t.Helper()
	switch {
	case want == "" && res.err != nil:
		t.Errorf("%v\n%s", res.err, res.output)
	case want != "" && (res.err == nil || !strings.Contains(res.err.Error(), want)):
		t.Errorf("got %v, want %q\n%s", res.err, want, res.output)
	}
}

func TestRefusesMutantsThatAreNotWellFormed(t *testing.T) {
	for name, c := range map[string]struct{ name, old, new, want string }{
		"other number":   {"04-sum", "", "", "03-short-name"},
		"no promise":     {"03-sum", "promise: 3\n", "", "promise must be"},
		"no test":        {"03-sum", "test: . TestSum\n", "", "test must be"},
		"no file":        {"03-sum", "file: sum.go\n", "", "needs a file"},
		"no end":         {"03-sum", ">>>>>>>\n", "", "needs a file"},
		"a strange line": {"03-sum", "# why", "why", "unexpected line"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := parseMutant(c.name, strings.Replace(sample, c.old, c.new, 1)); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
}

func TestOldTextOccursOnce(t *testing.T) {
	text := "\ta()\n\tb()\n\tb()\n\tab()\n"
	for name, c := range map[string]struct{ old, want string }{
		"whole line first": {"\ta()", "\tNEW\n\tb()\n\tb()\n\tab()\n"},
		"part of a line":   {"ab()", "\ta()\n\tb()\n\tb()\n\tNEW\n"},
		"twice":            {"\tb()", ""},
		"not at all":       {"c()", ""},
	} {
		t.Run(name, func(t *testing.T) {
			replacement := "NEW"
			if strings.HasPrefix(c.old, "\t") {
				replacement = "\tNEW"
			}
			got, err := change{"file", c.old, replacement}.apply(text)
			if (err != nil) != (c.want == "") || got != c.want {
				t.Errorf("got %q, %v", got, err)
			}
		})
	}
}

func TestEveryPromiseNeedsAMutant(t *testing.T) {
	var all []mutant
	for n := 1; n <= promises; n++ {
		all = append(all, mutant{promise: n})
	}
	if err := checkPromises(all); err != nil {
		t.Error(err)
	}
	if err := checkPromises(all[1:19]); err == nil || !strings.HasSuffix(err.Error(), "promise 1, 20") {
		t.Errorf("got %v", err)
	}
}

// Quicker to know than by running them all.
func TestEveryMutantCanBeApplied(t *testing.T) {
	all, err := readMutants(".")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range all {
		if _, err := changedFiles(filepath.Join("..", ".."), m.changes); err != nil {
			t.Errorf("%s: %v", m.name, err)
		}
	}
}
