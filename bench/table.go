package main

import (
	"fmt"
	"io"
	"strings"
	"unicode/utf8"
)

// table is printed in Markdown, with columns made straight for reading it as it is.
type table struct {
	title  string
	header []string
	rows   [][]string
}

func (t *table) add(cells ...string) { t.rows = append(t.rows, cells) }

func (t *table) print(w io.Writer) error {
	widths := make([]int, len(t.header))
	lines := append([][]string{t.header}, t.rows...)
	for _, cells := range lines {
		for i, cell := range cells {
			widths[i] = max(widths[i], utf8.RuneCountInString(cell))
		}
	}
	var b strings.Builder
	if t.title != "" {
		fmt.Fprintf(&b, "### %s\n\n", t.title)
	}
	for i, cells := range lines {
		for j, width := range widths {
			cell := ""
			if j < len(cells) {
				cell = cells[j]
			}
			fmt.Fprintf(&b, "| %s%s ", cell, strings.Repeat(" ", width-utf8.RuneCountInString(cell)))
		}
		b.WriteString("|\n")
		if i == 0 {
			for _, width := range widths {
				fmt.Fprintf(&b, "|%s", strings.Repeat("-", width+2))
			}
			b.WriteString("|\n")
		}
	}
	_, err := io.WriteString(w, b.String()+"\n")
	return err
}
