// Command bench compares this library with go-nsq, side by side on this machine. Without arguments it measures all and prints tables; see
// README.md for how to read them.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/signal"
	"strings"
	"time"
)

// roles are what a child process can be. Its first argument says which.
var roles = map[string]role{
	"client":      clientRole,
	"server-fake": fakeRole,
	"server-nsqd": nsqdRole,

	"scale-fleet":  fleetRole,
	"scale-client": fleetClientRole,

	"latency-server": latencyServerRole,
	"latency-client": latencyClientRole,
}

// section is a part of the benchmark with tables of its own.
type section struct {
	name string
	run  func(ctx context.Context, o options, w io.Writer) (missed int, err error) // missed counts targets
}

var sections = []section{
	{"consume", runConsume},
	{"scale", runScale},
	{"latency", runLatency},
}

// options are the flags.
type options struct {
	runs    int
	only    string
	scale   float64
	seed    uint64
	strict  bool
	profile string
	heap    int
	log     io.Writer // progress, for who waits
}

// random is seeded by the flag, so that the order of a run can be had again.
func (o options) random() *rand.Rand { return rand.New(rand.NewPCG(o.seed, 0)) }

// wants tells whether a row of this name is to be measured.
func (o options) wants(row string) bool { return strings.Contains(row, o.only) }

// scaled is a number of messages, or of other things, after -scale.
func (o options) scaled(n int) int { return max(1, int(float64(n)*o.scale)) }

func main() {
	if code, ok := playChild(); ok {
		os.Exit(code)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// run measures what the arguments say, and returns the exit code.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	var o options
	names := make([]string, len(sections))
	for i, s := range sections {
		names[i] = s.name
	}
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.Usage = func() {
		fmt.Fprintf(stderr, "usage: bench [flags] [section ...]\n\nSections: %s. All of them if none is named.\n\n", strings.Join(names, ", "))
		flags.PrintDefaults()
	}
	flags.IntVar(&o.runs, "runs", 5, "`times` to measure each row with each library")
	flags.StringVar(&o.only, "only", "", "measure only the rows with this `text` in their name")
	flags.Float64Var(&o.scale, "scale", 1, "`part` of the usual messages, for a quick look (0.1) or less noise (3)")
	flags.Uint64Var(&o.seed, "seed", uint64(time.Now().UnixNano()), "`number` that decides the order of runs")
	flags.BoolVar(&o.strict, "strict", false, "end with exit code 1 if a target is missed")
	flags.StringVar(&o.profile, "profile", "", "write CPU profiles of clients and servers to this `directory`")
	flags.IntVar(&o.heap, "heap", 0, "`MiB` that consume's clients hold besides, as a service would: the garbage collector then runs less often")
	if err := flags.Parse(args); err != nil {
		return 2
	}
	if o.runs < 1 || o.scale <= 0 || o.heap < 0 {
		fmt.Fprintln(stderr, "bench: -runs and -scale must be above 0, -heap not below it")
		return 2
	}
	selected, err := selectSections(flags.Args())
	if err != nil {
		fmt.Fprintln(stderr, "bench:", err)
		return 2
	}
	fmt.Fprintf(stdout, "%s, %s. %d runs, scale %v, heap %d MiB, seed %d.\n\n", time.Now().Format(time.DateOnly), machine(), o.runs, o.scale, o.heap, o.seed)
	start := time.Now()
	missed := 0
	o.log = stderr
	for _, s := range selected {
		n, err := s.run(ctx, o, stdout)
		if err != nil {
			fmt.Fprintf(stderr, "bench: %s: %v\n", s.name, err)
			return 1
		}
		missed += n
	}
	fmt.Fprintf(stderr, "bench: took %s\n", time.Since(start).Round(time.Second))
	if missed > 0 && o.strict {
		return 1
	}
	return 0
}

func selectSections(names []string) ([]section, error) {
	if len(names) == 0 {
		return sections, nil
	}
	var selected []section
	for _, name := range names {
		found := false
		for _, s := range sections {
			if s.name == name {
				selected = append(selected, s)
				found = true
			}
		}
		if !found {
			return nil, fmt.Errorf("no section %q", name)
		}
	}
	return selected, nil
}
