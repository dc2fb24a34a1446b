// Mutants breaks the library on purpose, and checks that the tests notice.
//
// Each *.mutant file beside this one is a small change that breaks a promise, with the test that must fail because of it:
//
//	promise: 1
//	test: . TestAnswerGoesOnceToTheWire
//	file: message.go
//	<<<<<<< old
//	text that occurs once in the file
//	=======
//	what replaces it
//	>>>>>>>
//
// test is the directory of a package and what to give to -run. More blocks may follow, each with a file line of its own if
// it is about another file. A line "build: -race" compiles the test with those flags, a line "env: GOARCH=386" with those
// variables set. Lines that begin with # say why. Run it from the root of the repository:
//
//	go run ./.ci/mutants [-v] [part of a name ...]
//
// It works in copies of the files that git knows or would add, and exits 1 if a test stays green, if it is not green without the
// mutant, if a mutant can't be applied or compiled, or if a promise has no mutant. With names it runs only those.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"text/tabwriter"
	"time"
)

const promises = 20

// testTimeout is how long a test may take to fail: one that hangs tells nobody what is wrong.
const testTimeout = 60 * time.Second

func main() {
	workers := flag.Int("workers", 2, "mutants tried at a time")
	limit := flag.Duration("limit", 25*time.Minute, "time for all of them together")
	verbose := flag.Bool("v", false, "show the output of tests that fail, and of those that should")
	flag.Parse()
	ctx, cancel := context.WithTimeout(context.Background(), *limit)
	defer cancel()
	if err := run(ctx, *workers, *verbose, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		os.Exit(1)
	}
}

// mutant is one file.
type mutant struct {
	name    string
	promise int
	test    test
	changes []change
}

// test is what must go red.
type test struct {
	module string // directory, of a module or a package in it
	run    string // regular expression for -run
	build  string // flags for compiling it
	env    string // variables for compiling it
}

func (t test) String() string {
	return strings.TrimSpace(strings.Join([]string{t.module, t.run, t.build, t.env}, " "))
}

type change struct{ file, old, new string }

// result is what became of a mutant: err is nil if the test went red.
type result struct {
	err    error
	output string // of the test
	took   time.Duration
}

func run(ctx context.Context, workers int, verbose bool, names []string) error {
	all, err := readMutants(filepath.Join(".ci", "mutants"))
	if err != nil {
		return err
	}
	mutants := chosen(all, names)
	if len(mutants) == 0 {
		return errors.New("there are none of that name")
	}
	scratch, err := os.MkdirTemp("", "mutants-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(scratch)
	trees := make([]*tree, workers)
	for i := range trees {
		if trees[i], err = copyTree(ctx, filepath.Join(scratch, strconv.Itoa(i))); err != nil {
			return err
		}
	}

	fmt.Printf("%d mutants, %d at a time\n", len(mutants), workers)
	green := tryAll(trees, distinctTests(mutants), func(tr *tree, t test) result { return tr.expectGreen(ctx, t) })
	red := tryAll(trees, mutants, func(tr *tree, m mutant) result { return tr.expectRed(ctx, m) })

	failed := 0
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "promise\tmutant\ttest\tresult")
	for i, m := range mutants {
		res := red[i]
		if without := green[slices.Index(distinctTests(mutants), m.test)]; without.err != nil {
			res = without
		}
		verdict := fmt.Sprintf("red (%.1fs)", res.took.Seconds())
		if res.err != nil {
			failed++
			verdict = "ERROR: " + res.err.Error()
		}
		fmt.Fprintf(w, "%d\t%s\t%s\t%s\n", m.promise, m.name, m.test, verdict)
	}
	w.Flush()
	for i, m := range mutants {
		if verbose || red[i].err != nil {
			fmt.Printf("\n--- output with %s\n%s", m.name, tail(red[i].output))
		}
	}
	for i, t := range distinctTests(mutants) {
		if green[i].err != nil {
			fmt.Printf("\n--- output of %s without a mutant\n%s", t, tail(green[i].output))
		}
	}
	if failed > 0 {
		return fmt.Errorf("%d of %d mutants failed", failed, len(mutants))
	}
	if len(names) > 0 {
		return nil
	}
	return checkPromises(all)
}

// tryAll has each tree work through the items, and returns the results in the order of the items.
func tryAll[T any](trees []*tree, items []T, try func(*tree, T) result) []result {
	results := make([]result, len(items))
	next := make(chan int, len(items))
	for i := range items {
		next <- i
	}
	close(next)
	var wg sync.WaitGroup
	for _, tr := range trees {
		wg.Go(func() {
			for i := range next {
				start := time.Now()
				results[i] = try(tr, items[i])
				results[i].took = time.Since(start)
			}
		})
	}
	wg.Wait()
	return results
}

func chosen(all []mutant, names []string) (some []mutant) {
	for _, m := range all {
		if len(names) == 0 || slices.ContainsFunc(names, func(n string) bool { return strings.Contains(m.name, n) }) {
			some = append(some, m)
		}
	}
	return some
}

func distinctTests(mutants []mutant) (tests []test) {
	for _, m := range mutants {
		if !slices.Contains(tests, m.test) {
			tests = append(tests, m.test)
		}
	}
	return tests
}

func checkPromises(all []mutant) error {
	var missing []string
	for n := 1; n <= promises; n++ {
		if !slices.ContainsFunc(all, func(m mutant) bool { return m.promise == n }) {
			missing = append(missing, strconv.Itoa(n))
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("no mutant breaks promise %s", strings.Join(missing, ", "))
	}
	return nil
}

// ---- reading

func readMutants(dir string) ([]mutant, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.mutant"))
	if err != nil {
		return nil, err
	}
	var mutants []mutant
	for _, file := range files { // sorted
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		m, err := parseMutant(strings.TrimSuffix(filepath.Base(file), ".mutant"), string(text))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		mutants = append(mutants, m)
	}
	return mutants, nil
}

var mutantName = regexp.MustCompile(`^(\d\d)-[a-z0-9-]+$`)

func parseMutant(name, text string) (mutant, error) {
	m := mutant{name: name}
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	file := ""
	for len(lines) > 0 {
		line := lines[0]
		key, value, _ := strings.Cut(line, ": ")
		switch {
		case line == "<<<<<<< old":
			middle, end := slices.Index(lines, "======="), slices.Index(lines, ">>>>>>>")
			if file == "" || middle <= 1 || end < middle {
				return m, errors.New("a block needs a file, an old text, ======= and >>>>>>>")
			}
			m.changes = append(m.changes, change{file, strings.Join(lines[1:middle], "\n"), strings.Join(lines[middle+1:end], "\n")})
			lines = lines[end:]
		case key == "promise":
			m.promise, _ = strconv.Atoi(value)
		case key == "test":
			m.test.module, m.test.run, _ = strings.Cut(value, " ")
		case key == "build":
			m.test.build = value
		case key == "env":
			m.test.env = value
		case key == "file":
			file = value
		case line != "" && !strings.HasPrefix(line, "#"):
			return m, fmt.Errorf("unexpected line %q", line)
		}
		lines = lines[1:]
	}
	switch number := mutantName.FindStringSubmatch(name); {
	case m.promise < 1 || m.promise > promises:
		return m, fmt.Errorf("promise must be 1 to %d", promises)
	case number == nil || number[1] != fmt.Sprintf("%02d", m.promise):
		return m, fmt.Errorf("the name must be %02d-short-name", m.promise)
	case m.test.run == "":
		return m, errors.New("test must be a directory and a regular expression")
	case len(m.changes) == 0:
		return m, errors.New("nothing is changed")
	}
	return m, nil
}

// ---- working in a copy

// tree is a copy of the repository.
type tree struct {
	root  string
	clean map[test]string // test binaries without a mutant, by all of test but run
}

func copyTree(ctx context.Context, root string) (*tree, error) {
	out, err := exec.CommandContext(ctx, "git", "ls-files", "-z", "--cached", "--others", "--exclude-standard").Output()
	if err != nil {
		return nil, fmt.Errorf("git ls-files: %w", err)
	}
	for name := range strings.SplitSeq(strings.TrimRight(string(out), "\x00"), "\x00") {
		data, err := os.ReadFile(name)
		if errors.Is(err, os.ErrNotExist) {
			continue // deleted, but git has not been told yet
		}
		if err != nil {
			return nil, err
		}
		to := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			return nil, err
		}
		if err := os.WriteFile(to, data, 0o644); err != nil {
			return nil, err
		}
	}
	return &tree{root, map[test]string{}}, nil
}

func (tr *tree) expectGreen(ctx context.Context, t test) result {
	out, err := tr.runClean(ctx, t)
	switch {
	case errors.As(err, new(*exec.ExitError)):
		err = errors.New("the test fails without the mutant")
	case err == nil && !strings.Contains(out, "--- PASS: "):
		err = errors.New("no test of that name passes without the mutant")
	}
	return result{err: err, output: out}
}

func (tr *tree) expectRed(ctx context.Context, m mutant) result {
	undo, err := tr.apply(m.changes)
	defer undo()
	if err != nil {
		return result{err: err}
	}
	binary := filepath.Join(tr.root, "mutant.test")
	out, err := tr.compile(ctx, m.test, binary)
	if err == nil {
		out, err = tr.runTest(ctx, m.test, binary)
	}
	switch {
	case err == nil:
		err = errors.New("SURVIVED: the test is green")
	case !errors.As(err, new(*exec.ExitError)):
	case strings.Contains(out, "panic: test timed out"):
		err = errors.New("the test hangs")
	case failed.MatchString(out):
		err = nil
	default:
		err = errors.New("the output names no failed test")
	}
	return result{err: err, output: out}
}

// failed is a failed test, or the end of a process in which a test was running.
var failed = regexp.MustCompile(`(?m)^\s*--- FAIL: |^(panic|fatal error): `)

// apply changes the files. undo must be called in any case.
func (tr *tree) apply(changes []change) (undo func(), err error) {
	before := map[string][]byte{}
	undo = func() {
		for path, data := range before {
			if err := os.WriteFile(path, data, 0o644); err != nil {
				panic(err) // all that follows would be wrong
			}
		}
	}
	changed, err := changedFiles(tr.root, changes)
	if err != nil {
		return undo, err
	}
	for path, f := range changed {
		before[path] = f.before
		if err := os.WriteFile(path, []byte(f.after), 0o644); err != nil {
			return undo, err
		}
	}
	return undo, nil
}

type changedFile struct {
	before []byte
	after  string
}

// changedFiles tells what the changes, one after the other, make of the files under root. It writes nothing.
func changedFiles(root string, changes []change) (map[string]changedFile, error) {
	files := map[string]changedFile{}
	for _, c := range changes {
		path := filepath.Join(root, c.file)
		f, ok := files[path]
		if !ok {
			data, err := os.ReadFile(path)
			if err != nil {
				return nil, err
			}
			f = changedFile{data, string(data)}
		}
		var err error
		if f.after, err = c.apply(f.after); err != nil {
			return nil, err
		}
		files[path] = f
	}
	return files, nil
}

// apply replaces whole lines if they occur once, and else a part of one.
func (c change) apply(text string) (string, error) {
	var starts, lines []int
	for i := 0; ; i++ {
		n := strings.Index(text[i:], c.old)
		if n < 0 {
			break
		}
		i += n
		end := i + len(c.old)
		starts = append(starts, i)
		if (i == 0 || text[i-1] == '\n') && (end == len(text) || text[end] == '\n') {
			lines = append(lines, i)
		}
	}
	if len(lines) > 0 {
		starts = lines
	}
	if len(starts) != 1 {
		return "", fmt.Errorf("the old text occurs %d times in %s: %.60q", len(starts), c.file, c.old)
	}
	return text[:starts[0]] + c.new + text[starts[0]+len(c.old):], nil
}

// runClean runs a test without a mutant. What is compiled for it serves the other tests of the package too.
func (tr *tree) runClean(ctx context.Context, t test) (output string, err error) {
	key := t
	key.run = ""
	if tr.clean[key] == "" {
		binary := filepath.Join(tr.root, fmt.Sprintf("clean-%d.test", len(tr.clean)))
		if out, err := tr.compile(ctx, t, binary); err != nil {
			return out, err
		}
		tr.clean[key] = binary
	}
	return tr.runTest(ctx, t, tr.clean[key])
}

// compile makes a test binary. Its error is never an *exec.ExitError.
func (tr *tree) compile(ctx context.Context, t test, binary string) (output string, err error) {
	args := []string{"go", "test", "-c", "-o", binary, "-ldflags=-s -w", "-gcflags=-dwarf=false"} // nobody will debug it
	args = append(args, strings.Fields(t.build)...)
	out, err := command(ctx, filepath.Join(tr.root, t.module), strings.Fields(t.env), append(args, ".")...)
	if err != nil {
		return out, fmt.Errorf("it does not compile: %v", err) // not %w: this is no failed test
	}
	return out, nil
}

// runTest runs some tests of a binary. The error is an *exec.ExitError if they failed.
func (tr *tree) runTest(ctx context.Context, t test, binary string) (output string, err error) {
	return command(ctx, filepath.Join(tr.root, t.module), nil,
		binary, "-test.run", t.run, "-test.v", "-test.timeout", testTimeout.String())
}

func command(ctx context.Context, dir string, env []string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, testTimeout+2*time.Minute)
	defer cancel()
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), env...)
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.WaitDelay = time.Second // children that keep the output open
	err := cmd.Run()
	if ctx.Err() != nil {
		err = fmt.Errorf("%s: %w", filepath.Base(args[0]), context.Cause(ctx))
	}
	return out.String(), err
}

// tail is the end of a test's output.
func tail(out string) string {
	const most = 3000
	if len(out) > most {
		out = "…" + out[len(out)-most:]
	}
	return out
}
